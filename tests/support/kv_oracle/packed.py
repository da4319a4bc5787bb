"""The other forms of a transfer (strided runs, packing for the bounce buffer) name the same bytes as the plain runs."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.world import arrays
from kvtransfer import packing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kv_oracle.world import World
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.regions import RegionPairs
    from kvtransfer.windows import Chunk

Bytes = tuple["NDArray[np.int64]", "NDArray[np.int64]"]


def every_byte(src: NDArray[np.int64], dst: NDArray[np.int64], length: NDArray[np.int64]) -> Bytes:
    """(source, destination) of every single byte of the runs, in their order."""
    step = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
    return np.repeat(src, length) + step, np.repeat(dst, length) + step


def check_other_forms(world: World, plan: PeerPlan, chunk: Chunk, pairs: RegionPairs) -> None:
    """Strided runs written out, and a gather followed by a scatter, move exactly the bytes of `pairs`."""
    src_blocks, src_begins = arrays(world.src, plan.src_rank, world.src_lists[plan.src_rank])
    dst_blocks, dst_begins = arrays(world.dst, plan.dst_rank, world.dst_lists[plan.dst_rank])
    transfer = plan.resolve(src_blocks, dst_blocks, chunk, src_begins=src_begins, dst_begins=dst_begins)
    plain = every_byte(pairs.src, pairs.dst, pairs.lengths)
    assert transfer.nbytes == pairs.nbytes, f"resolve counts {transfer.nbytes} bytes, the runs have {pairs.nbytes}"
    rows = transfer.strided()
    count = rows.count.astype(np.int64)
    turn = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    written = every_byte(
        np.repeat(rows.src, count) + turn * np.repeat(rows.src_step, count),
        np.repeat(rows.dst, count) + turn * np.repeat(rows.dst_step, count),
        np.repeat(rows.unit, count),
    )
    _same(plain, written, "strided runs")
    out = packing.gather(plan, src_blocks, dst_blocks, chunk, src_begins=src_begins, dst_begins=dst_begins)
    back = packing.scatter(plan, dst_blocks, chunk, dst_begins=dst_begins)
    read, packed_at = every_byte(out.src, out.dst, out.lengths)
    packed_from, written_to = every_byte(back.src, back.dst, back.lengths)
    every = np.arange(pairs.nbytes)
    for name, offsets in (("gather", packed_at), ("scatter", packed_from)):
        assert np.array_equal(np.sort(offsets), every), f"{name} does not fill [0, {pairs.nbytes}) exactly"
    size = packing.packed_bytes(plan, dst_blocks, chunk, dst_begins=dst_begins)
    assert size == pairs.nbytes, f"packed_bytes says {size}, the runs have {pairs.nbytes}"
    _check_parts(world, plan, chunk, (read, packed_at), (packed_from, written_to))
    in_order = written_to[np.argsort(packed_from)]
    _same(plain, (read[np.argsort(packed_at)], in_order), "gather and scatter")
    place = _places(world, plan.dst_rank, in_order)
    assert (place[1:] > place[:-1]).all(), "packed bytes are not in the order of the destination"


def _check_parts(world: World, plan: PeerPlan, chunk: Chunk, gathered: Bytes, scattered: Bytes) -> None:
    """Chunks cut at any byte, one after the other, are the whole."""
    src_blocks, src_begins = arrays(world.src, plan.src_rank, world.src_lists[plan.src_rank])
    dst_blocks, dst_begins = arrays(world.dst, plan.dst_rank, world.dst_lists[plan.dst_rank])
    source = packing.pack_source(plan, src_blocks, dst_blocks, chunk, src_begins=src_begins, dst_begins=dst_begins)
    target = packing.pack_destination(plan, dst_blocks, chunk, dst_begins=dst_begins)
    sizes: list[int] = []
    for only in (frozenset({group.dst.number}) for group in plan.groups):
        one = packing.pack_destination(plan, dst_blocks, chunk, dst_begins=dst_begins, groups=only)
        other = packing.pack_source(
            plan, src_blocks, dst_blocks, chunk, src_begins=src_begins, dst_begins=dst_begins, groups=only
        )
        assert one.nbytes == other.nbytes, f"groups {set(only)}: {other.nbytes} bytes sent, {one.nbytes} expected"
        sizes.append(one.nbytes)
    assert sum(sizes) == source.nbytes, f"the groups have {sizes} bytes, together they are {source.nbytes}"
    cuts = [source.nbytes * part // 3 for part in range(4)]
    for packed, whole, what in ((source, gathered, "gather"), (target, scattered, "scatter")):
        parts: list[Bytes] = []
        for begin, end in pairwise(cuts):
            rows = packed.part(begin, end).pairs()
            shift = (0, begin) if what == "gather" else (begin, 0)
            parts.append(every_byte(rows.src + shift[0], rows.dst + shift[1], rows.lengths))
        _same(
            whole, (np.concatenate([a for a, _ in parts]), np.concatenate([b for _, b in parts])), f"parts of a {what}"
        )


def _same(plain: Bytes, other: Bytes, what: str) -> None:
    a, b = (np.stack(pair)[:, np.argsort(pair[1], kind="stable")] for pair in (plain, other))
    assert np.array_equal(a, b), f"{what} move other bytes than the plain runs"


def _places(world: World, rank: int, addresses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each destination byte stands in the packing order: (layer group, pool, layer, view, n-th buffer, block
    ordinal, offset), counted out with loops."""
    spans: list[tuple[tuple[int, ...], int, int]] = []
    storage = world.dst.storages[rank]
    for i, group in enumerate(storage.groups):
        listed = world.dst_lists[rank][group.group]
        for v, view in enumerate(group.views):
            seen: dict[int, int] = {}
            for position, _, _ in view.entries:
                layer, nth = group.layers[position], seen.get(position, 0)
                seen[position] = nth + 1
                buffer = storage.buffers[group.group, view.part, layer, nth]
                for ordinal, slot in enumerate(listed.slots):
                    if slot >= 0:
                        key = (i, view.pool, layer, v, nth, ordinal)
                        spans.append((key, buffer.start + slot * buffer.stride, buffer.size))
    spans.sort()
    sizes = np.array([size for _, _, size in spans], np.int64)
    starts = np.array([start for _, start, _ in spans], np.int64)
    before = np.cumsum(sizes) - sizes
    by_address = np.argsort(starts)
    found = by_address[np.searchsorted(starts[by_address], addresses, side="right") - 1]
    return before[found] + addresses - starts[found]
