"""The bounce packing, normative: where each byte of one writer's chunk lies in one dense range, without descriptors.

    destination-major:  layer group, pool, layer, buffer, destination block ordinal, offset in the buffer

    buffer HND   | block 0: h0 t0 t1, h1 t0 t1 | block 1: h0 t0 …        only the heads and tokens this writer sends,
    buffer NHD   | block 0: t0 h0 h1, t1 h0 h1 | block 1: t0 …           no holes

Buffers of a layer are ordered by view, then as the view lists them. Blocks whose destination is -1 are left out. The
source gathers by it, the destination scatters by it; `PACKING_VERSION` is negotiated, and any change here changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.instantiate import place, place_destination, split
from kvtransfer.transfer import StridedRuns, join_strided
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.instantiate import Begins, BlockLists, Placed
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import TokenRange
    from kvtransfer.regions import RegionPairs
    from kvtransfer.run_table import RunTable

PACKING_VERSION = 1


def gather_strided(
    plan: PeerPlan,
    src_blocks: BlockLists,
    dst_blocks: BlockLists,
    tokens: TokenRange | Chunk,
    *,
    src_begins: Begins = None,
    dst_begins: Begins = None,
) -> StridedRuns:
    """Source address -> packed offset. Arguments and errors as in `PeerPlan.resolve`."""
    chunk, at, parts = Chunk.of(tokens), 0, list[StridedRuns]()
    for group in plan.groups:
        placed = place(group, src_blocks, dst_blocks, chunk, src_begins, dst_begins)
        for one in _packed(group, placed, at):
            runs, pieces = one.runs, one.pieces
            address = _addresses(runs.src, pieces.src, runs.src_stride, pieces.src_phase, runs.src_step)
            parts.append(_runs(one, (address, one.offset), (runs.src_step, one.step)))
        at += _size(group, placed)
    return join_strided(parts)


def scatter_strided(
    plan: PeerPlan, dst_blocks: BlockLists, tokens: TokenRange | Chunk, *, dst_begins: Begins = None
) -> StridedRuns:
    """Packed offset -> destination address: what the receiver computes alone."""
    chunk, at, parts = Chunk.of(tokens), 0, list[StridedRuns]()
    for group in plan.groups:
        placed = place_destination(group, dst_blocks, chunk, dst_begins)
        for one in _packed(group, placed, at):
            runs, pieces = one.runs, one.pieces
            address = _addresses(runs.dst, pieces.dst, runs.dst_stride, pieces.dst_phase, runs.dst_step)
            parts.append(_runs(one, (one.offset, address), (one.step, runs.dst_step)))
        at += _size(group, placed)
    return join_strided(parts)


def packed_bytes(
    plan: PeerPlan, dst_blocks: BlockLists, tokens: TokenRange | Chunk, *, dst_begins: Begins = None
) -> int:
    """Length of the packed range."""
    chunk = Chunk.of(tokens)
    return sum(_size(group, place_destination(group, dst_blocks, chunk, dst_begins)) for group in plan.groups)


def gather(
    plan: PeerPlan,
    src_blocks: BlockLists,
    dst_blocks: BlockLists,
    tokens: TokenRange | Chunk,
    *,
    src_begins: Begins = None,
    dst_begins: Begins = None,
) -> RegionPairs:
    """`gather_strided`, every run written out."""
    return gather_strided(plan, src_blocks, dst_blocks, tokens, src_begins=src_begins, dst_begins=dst_begins).pairs()


def scatter(
    plan: PeerPlan, dst_blocks: BlockLists, tokens: TokenRange | Chunk, *, dst_begins: Begins = None
) -> RegionPairs:
    """`scatter_strided`, every run written out."""
    return scatter_strided(plan, dst_blocks, tokens, dst_begins=dst_begins).pairs()


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """`offset` bytes [runs, pieces] of the first token; `step` bits [runs] from token to token."""

    runs: RunTable
    pieces: Placed
    offset: NDArray[np.int64]
    step: NDArray[np.int64]


def _packed(group: GroupPlan, placed: Placed, at: int) -> list[_Packed]:
    """The whole and the cut blocks of a group whose packed range begins at byte `at`."""
    if not len(placed):
        return []
    block_begin, block_tokens, within = _in_blocks(placed)
    total, made = int(placed.count.sum()), list[_Packed]()
    full = group.full_blocks(placed.src_phase, placed.dst_phase, placed.count)
    for chosen, pieces in zip((full, ~full), split(group, placed), strict=True):
        if not len(pieces):
            continue
        runs = group.whole_runs if chosen is full else group.cut_runs
        base, row, prefix = _in_buffers(runs, total)
        begin, tokens, before = block_begin[chosen], block_tokens[chosen], within[chosen]
        major = runs.token_major == 1
        head_major = np.outer(row, begin) + np.outer(prefix, tokens) + np.outer(runs.unit, before)
        token_major = np.outer(row, begin + before) + prefix[:, None]
        bits = base[:, None] + np.where(major[:, None], token_major, head_major)
        made.append(_Packed(runs, pieces, at + (bits >> 3), np.where(major, row, runs.unit)))
    return made


def _in_blocks(placed: Placed) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per piece: tokens packed before its destination block, tokens of that block, and those of it before the piece."""
    new = np.ones(len(placed), np.bool_)
    new[1:] = placed.ordinal[1:] != placed.ordinal[:-1]
    first = np.flatnonzero(new)
    block = np.cumsum(new) - 1
    before = np.cumsum(placed.count) - placed.count
    return before[first][block], np.add.reduceat(placed.count, first)[block], before - before[first][block]


def _in_buffers(runs: RunTable, tokens: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per run, in bits: begin of its buffer, one token of its buffer, and the runs of the token before it."""
    new = np.ones(len(runs), np.bool_)
    new[1:] = runs.buffer[1:] != runs.buffer[:-1]
    first = np.flatnonzero(new)
    buffer = np.cumsum(new) - 1
    row = np.add.reduceat(runs.unit, first)
    before = np.cumsum(runs.unit) - runs.unit
    return (np.cumsum(row) - row)[buffer] * tokens, row[buffer], before - before[first][buffer]


def _size(group: GroupPlan, placed: Placed) -> int:
    if not len(placed):
        return 0
    return int(group.bits_per_token) * int(placed.count.sum()) >> 3


def _addresses(
    base: NDArray[np.int64],
    block: NDArray[np.int64],
    stride: NDArray[np.int64],
    phase: NDArray[np.int64],
    step: NDArray[np.int64],
) -> NDArray[np.int64]:
    return base[:, None] + np.outer(stride, block) + (np.outer(step, phase) >> 3)


def _runs(
    one: _Packed,
    ends: tuple[NDArray[np.int64], NDArray[np.int64]],
    steps: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> StridedRuns:
    """One row for each (run, piece); tokens that follow each other on both ends are one run."""
    unit, tokens = one.runs.unit, one.pieces.count
    solid = ((unit == steps[0]) & (unit == steps[1]))[:, None]
    shape = (len(unit), len(tokens))
    length = np.where(solid, np.outer(unit, tokens), unit[:, None]) >> 3
    count = np.where(solid, 1, tokens[None, :])
    hops = (np.broadcast_to(np.where(solid, 0, step[:, None] >> 3), shape) for step in steps)
    columns = (*ends, length, count, *hops)
    return StridedRuns(*(np.ascontiguousarray(column).reshape(-1) for column in columns))
