"""One request on one matched pair of layer groups: pieces of blocks and bundles of runs become grids.

pieces   blocks that are whole on both sides     x  whole bundles      (consecutive blocks joined where dense)
         the others: phase and count             x  cut bundles
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.block_lists import NO_BLOCK, destination_list, first_block, pick_source, source_list
from kvtransfer.pieces import Pieces, cut, lengths
from kvtransfer.run_table import UnalignedSlice
from kvtransfer.transfer import Grid
from kvtransfer.windows import window_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvtransfer.bundles import Bundle
    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.windows import Chunk, Window

    BlockLists = Mapping[int, NDArray[np.int32]]
    Begins = Mapping[int, int] | None
    # Groups of a chunk that move something, with their pieces.
    Located = Sequence[tuple[GroupPlan, "Placed"]]


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Pieces with their blocks on both sides, and where in the blocks they begin. int64[N] each. `ordinal`: number of
    the destination block among those of the sequence."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    src_phase: NDArray[np.int64]
    dst_phase: NDArray[np.int64]
    count: NDArray[np.int64]
    ordinal: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.count)

    def take(self, index: NDArray[np.int64] | NDArray[np.bool_]) -> Placed:
        """The pieces of these numbers."""
        return Placed(
            self.src[index],
            self.dst[index],
            self.src_phase[index],
            self.dst_phase[index],
            self.count[index],
            self.ordinal[index],
        )


_NONE = Placed(*(np.empty(0, np.int64) for _ in range(6)))


def wanted_from(chunk: Chunk, begins: Begins, group: int) -> int:
    """First token that the destination lists."""
    return max(chunk.prompt.begin, (begins or {}).get(group, 0))


def group_window(group: GroupPlan, chunk: Chunk, dst_begins: Begins) -> Window:
    """Tokens of the chunk that the pair of groups moves."""
    begin = wanted_from(chunk, dst_begins, group.dst.number)
    return window_of(group.group, group.src.shard, group.src.block, begin, chunk)


def cut_window(group: GroupPlan, window: Window, prompt: int) -> Pieces:
    """The window in pieces. A recurrent state is one."""
    if group.recurrent:
        one = np.ones(min(1, len(window)), np.int64)
        return Pieces(one - 1, one - 1, one)
    return cut(window, prompt, group.src.shard, group.src.block, group.dst.shard, group.dst.block)


def place_destination(group: GroupPlan, dst_blocks: BlockLists, chunk: Chunk, dst_begins: Begins) -> Placed:
    """The pieces that the destination wants, with the destination's blocks only (`src` is the local source block)."""
    prompt = chunk.prompt.end
    begin = wanted_from(chunk, dst_begins, group.dst.number)
    listed = destination_list(group, dst_blocks, begin, prompt) if begin < prompt else np.empty(0, np.int64)
    pieces = cut_window(group, group_window(group, chunk, dst_begins), prompt)
    ordinal, dst_phase = np.divmod(pieces.dst, group.dst.block)
    dst = listed[ordinal - (0 if group.recurrent else first_block(group.dst, begin, prompt))]
    alike = pieces.src is pieces.dst and group.src.block == group.dst.block
    src, src_phase = (ordinal, dst_phase) if alike else np.divmod(pieces.src, group.src.block)
    placed = Placed(src, dst, src_phase, dst_phase, pieces.count, ordinal)
    wanted = dst != NO_BLOCK
    return placed if wanted.all() else placed.take(wanted)


def place(
    group: GroupPlan,
    src_blocks: BlockLists,
    dst_blocks: BlockLists,
    chunk: Chunk,
    src_begins: Begins,
    dst_begins: Begins,
) -> Placed:
    """The pieces to move, with the blocks of both sides. Raises PlanError before an address is computed."""
    placed = place_destination(group, dst_blocks, chunk, dst_begins)
    if not len(placed):
        return placed
    begin = 0 if group.recurrent else (src_begins or {}).get(group.src.number, 0)
    src = pick_source(group, source_list(group, src_blocks), placed.src, begin, chunk.prompt.end)
    return Placed(src, placed.dst, placed.src_phase, placed.dst_phase, placed.count, placed.ordinal)


def split(group: GroupPlan, placed: Placed) -> tuple[Placed, Placed]:
    """(whole blocks on both sides, the others). Raises UnalignedSlice when one of the others would cut a byte."""
    full = group.full_blocks(placed.src_phase, placed.dst_phase, placed.count)
    if full.all():
        return placed, _NONE
    rest = placed.take(~full)
    if not group.byte_grained:
        grain = int(np.gcd.reduce(np.concatenate((rest.src_phase, rest.dst_phase, rest.count))))
        if not group.cut_runs.aligned(grain):
            raise UnalignedSlice(f"cut after {grain} tokens", f"cut after {grain} tokens")
    return placed.take(full), rest


def grids_of(group: GroupPlan, placed: Placed) -> list[Grid]:
    """What these pieces move."""
    full, rest = split(group, placed)
    grids: list[Grid] = []
    if len(full):
        joined = _consecutive(full) if any(one.dense for one in group.whole) else None
        grids.extend(_whole(one, full, joined, group.src.block) for one in group.whole)
    if len(rest):
        grids.extend(_cut(one, rest) for one in group.cut)
    return grids


def _consecutive(full: Placed) -> tuple[Placed, NDArray[np.int64]]:
    """Runs of blocks that follow each other on both sides: their first blocks, and how many there are."""
    if (full.src[1:] < full.src[:-1]).any():
        full = full.take(np.argsort(full.src, kind="stable"))
    new = np.ones(len(full), np.bool_)
    new[1:] = (full.src[1:] - full.src[:-1] != 1) | (full.dst[1:] - full.dst[:-1] != 1)
    first = new.nonzero()[0]
    return full.take(first), lengths(first, len(full))


def _whole(one: Bundle, full: Placed, joined: tuple[Placed, NDArray[np.int64]] | None, tokens: int) -> Grid:
    if one.dense and joined is not None:
        full, times = joined
        length, count = (one.unit >> 3) * times, np.ones_like(times)
    else:
        length = np.full(len(full), one.unit >> 3, np.int64)
        count = np.full(len(full), 1 if one.solid else tokens, np.int64)
    steps = (0, 0) if one.solid else (one.src_step >> 3, one.dst_step >> 3)
    return Grid(one.src, one.dst, full.src * one.src_stride, full.dst * one.dst_stride, length, count, *steps)


def _cut(one: Bundle, rest: Placed) -> Grid:
    src = rest.src * one.src_stride + (rest.src_phase * one.src_step >> 3)
    dst = rest.dst * one.dst_stride + (rest.dst_phase * one.dst_step >> 3)
    if one.solid:
        return Grid(one.src, one.dst, src, dst, rest.count * one.unit >> 3, np.ones_like(rest.count))
    length = np.full(len(rest), one.unit >> 3, np.int64)
    return Grid(one.src, one.dst, src, dst, length, rest.count, one.src_step >> 3, one.dst_step >> 3)
