"""The bounce packing, normative: where each byte of one writer's chunk lies in one dense range, without descriptors.

    destination-major:  layer group, pool, layer, buffer, destination block ordinal, offset in the buffer

    buffer HND   | block 0: h0 t0 t1, h1 t0 t1 | block 1: h0 t0 …        only the heads and tokens this writer sends,
    buffer NHD   | block 0: t0 h0 h1, t1 h0 h1 | block 1: t0 …           no holes

Buffers of a layer are ordered by view, then as the view lists them. Blocks whose destination is -1 are left out. The
source gathers by it, the destination scatters by it; `PACKING_VERSION` is negotiated, and any change here changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.instantiate import place, place_destination, split
from kvtransfer.packed import Packed, PackedGrid, PiecePlaces, RunPlaces
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.instantiate import Begins, BlockLists, Located, Placed
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import TokenRange
    from kvtransfer.regions import RegionPairs
    from kvtransfer.run_table import RunTable
    from kvtransfer.transfer import StridedRuns

PACKING_VERSION = 1


def pack_source(
    plan: PeerPlan,
    src_blocks: BlockLists,
    dst_blocks: BlockLists,
    tokens: TokenRange | Chunk,
    *,
    src_begins: Begins = None,
    dst_begins: Begins = None,
    groups: frozenset[int] | None = None,
) -> Packed:
    """Source address -> packed offset. Arguments and errors as in `PeerPlan.resolve`. `groups`: only these layer groups
    of the destination are packed; None = all."""
    chunk = Chunk.of(tokens)
    return pack_located(
        [
            (group, place(group, src_blocks, dst_blocks, chunk, src_begins, dst_begins))
            for group in _chosen(plan, groups)
        ],
        reads=True,
    )


def pack_located(located: Located, *, reads: bool) -> Packed:
    """The packed range of groups that have been located. `reads`: addresses are those of the source."""
    at, grids = 0, list[PackedGrid]()
    for group, placed in located:
        grids += packed_grids(group, placed, at, reads=reads)
        at += _size(group, placed)
    return Packed(tuple(grids), at)


def pack_destination(
    plan: PeerPlan,
    dst_blocks: BlockLists,
    tokens: TokenRange | Chunk,
    *,
    dst_begins: Begins = None,
    groups: frozenset[int] | None = None,
) -> Packed:
    """Packed offset -> destination address: what the receiver computes alone."""
    chunk = Chunk.of(tokens)
    located = [(group, place_destination(group, dst_blocks, chunk, dst_begins)) for group in _chosen(plan, groups)]
    return pack_located(located, reads=False)


def gather_strided(
    plan: PeerPlan,
    src_blocks: BlockLists,
    dst_blocks: BlockLists,
    tokens: TokenRange | Chunk,
    *,
    src_begins: Begins = None,
    dst_begins: Begins = None,
) -> StridedRuns:
    """`pack_source`, all of it."""
    packed = pack_source(plan, src_blocks, dst_blocks, tokens, src_begins=src_begins, dst_begins=dst_begins)
    return packed.part(0, packed.nbytes)


def scatter_strided(
    plan: PeerPlan, dst_blocks: BlockLists, tokens: TokenRange | Chunk, *, dst_begins: Begins = None
) -> StridedRuns:
    """`pack_destination`, all of it."""
    packed = pack_destination(plan, dst_blocks, tokens, dst_begins=dst_begins)
    return packed.part(0, packed.nbytes)


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


def packed_grids(group: GroupPlan, placed: Placed, at: int, *, reads: bool) -> list[PackedGrid]:
    """The whole and the cut blocks of a group whose packed range begins at byte `at`."""
    if not len(placed):
        return []
    block_begin, block_tokens, within = _in_blocks(placed)
    total, made = int(placed.count.sum()), list[PackedGrid]()
    full = group.full_blocks(placed.src_phase, placed.dst_phase, placed.count)
    for chosen, pieces in zip((full, ~full), split(group, placed), strict=True):
        if not len(pieces):
            continue
        block, phase = (pieces.src, pieces.src_phase) if reads else (pieces.dst, pieces.dst_phase)
        where = PiecePlaces(block, phase, block_begin[chosen], block_tokens[chosen], within[chosen], pieces.count)
        made.append(PackedGrid(run_places(group, whole=chosen is full, reads=reads), where, total, at, reads=reads))
    return made


def places_of(plan: PeerPlan, *, reads: bool) -> list[RunPlaces]:
    """All that requests of a plan will use on one side."""
    made: list[RunPlaces] = []
    for group in plan.groups:
        whole = group.aligned_blocks
        if whole:
            made.append(run_places(group, whole=True, reads=reads))
        if not whole or group.grain != group.src.block:
            made.append(run_places(group, whole=False, reads=reads))
    return made


def run_places(group: GroupPlan, *, whole: bool, reads: bool) -> RunPlaces:
    """Where the runs of whole or of cut blocks lie, on the source (`reads`) or on the destination. Made once."""
    known = group.places.get((whole, reads))
    if known is not None:
        return known
    runs = group.whole_runs if whole else group.cut_runs
    before, row, prefix = _in_buffers(runs)
    address = (runs.src, runs.src_stride, runs.src_step) if reads else (runs.dst, runs.dst_stride, runs.dst_step)
    major, layer = runs.token_major == 1, group.layer_of_buffer[runs.buffer]
    longest = min(group.src.block, group.dst.block)
    made = RunPlaces(*address, runs.unit, before, row, prefix, major, layer, longest)
    group.places[whole, reads] = made
    return made


def _chosen(plan: PeerPlan, groups: frozenset[int] | None) -> list[GroupPlan]:
    return [group for group in plan.groups if groups is None or group.dst.number in groups]


def _in_blocks(placed: Placed) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per piece: tokens packed before its destination block, tokens of that block, and those of it before the piece."""
    new = np.ones(len(placed), np.bool_)
    new[1:] = placed.ordinal[1:] != placed.ordinal[:-1]
    first = np.flatnonzero(new)
    block = np.cumsum(new) - 1
    before = np.cumsum(placed.count) - placed.count
    return before[first][block], np.add.reduceat(placed.count, first)[block], before - before[first][block]


def _in_buffers(runs: RunTable) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Per run, in bits of one token: the buffers before its own, its buffer, and the runs of the buffer before it."""
    new = np.ones(len(runs), np.bool_)
    new[1:] = runs.buffer[1:] != runs.buffer[:-1]
    first = np.flatnonzero(new)
    buffer = np.cumsum(new) - 1
    row = np.add.reduceat(runs.unit, first)
    prefix = np.cumsum(runs.unit) - runs.unit
    return (np.cumsum(row) - row)[buffer], row[buffer], prefix - prefix[first][buffer]


def _size(group: GroupPlan, placed: Placed) -> int:
    if not len(placed):
        return 0
    return int(group.bits_per_token) * int(placed.count.sum()) >> 3
