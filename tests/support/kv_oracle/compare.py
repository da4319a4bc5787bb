"""What the runs did against what the loops say, and what was reported against what was done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.expected import wanted
from kv_oracle.model import Attention
from kvtransfer.manifest import Manifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from kv_oracle.memory import Memory
    from kv_oracle.world import World
    from kvtransfer.manifest import Need
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import Extent
    from kvtransfer.windows import Chunk

Grids = dict[tuple[int, int, int], "NDArray[np.bool_]"]  # (group, part, layer) -> tokens


def compare_bytes(
    world: World, rank: int, target: Memory, writers: NDArray[np.int64], seed_compat: bool = False
) -> None:
    """Every byte of a destination rank: value, number of writes, writer."""
    case = world.case
    want = wanted(case, world.codes, world.src, world.dst, rank, world.dst_lists[rank], target, seed_compat)
    must = want.codes >= 0
    missing = must & (target.writes == 0)
    assert not missing.any(), f"rank {rank}: {missing.sum()} bytes were not written, first {_where(missing)}"
    wrong = must & (target.codes != want.codes)
    assert not wrong.any(), f"rank {rank}: {wrong.sum()} bytes are wrong, first {_where(wrong)}"
    touched = ~must & ~want.free & (target.writes > 0)
    assert not touched.any(), f"rank {rank}: {touched.sum()} bytes are nobody's business, first {_where(touched)}"
    other = must & (writers != want.writer)
    assert not other.any(), (
        f"rank {rank}: {other.sum()} bytes came from the wrong rank: {set(writers[other].tolist())} "
        f"instead of {set(want.writer[other].tolist())}"
    )


def compare_tokens(
    world: World, plan: PeerPlan, chunk: Chunk, moved: NDArray[np.int64], extents: Sequence[Extent], whole: Grids
) -> None:
    """A pair wrote in this chunk exactly the tokens that are due, and reports them. `whole`: what the pair needs."""
    done = world.codes.grids(moved, world.case.prompt)
    said = tokens_of(world, plan.dst_rank, extents)
    pair = f"ranks {plan.src_rank} -> {plan.dst_rank}"
    for key in done.keys() | said.keys() | whole.keys():
        a, b, due = done.get(key), said.get(key), whole.get(key)
        if isinstance(world.case.model.groups[key[0]], Attention):
            now = _due(world, plan.src_rank, chunk, key[0])
            held = _held(world, plan, key[0])
            due = None if due is None else due & now & held
            b = None if b is None else b & held
            if a is not None and world.case.windowed(key[0]) and chunk.is_last:
                a = a & now  # tokens before the window may come with its first block
        elif not chunk.is_last:
            due = None
        assert _equal(a, due), f"{pair}, {key}: wrote {_list(a)} up to {chunk.tokens.end}, due were {_list(due)}"
        assert _equal(a, b), f"{pair}, {key}: wrote {_list(a)}, reported {_list(b)}"


def _due(world: World, rank: int, chunk: Chunk, g: int) -> NDArray[np.bool_]:
    """Tokens of an attention group that a source rank sends with this chunk: full source blocks of what is computed,
    the rest with the last chunk; a window that is shorter than the prompt only then."""
    case, tokens, size = world.case, world.src_lists[rank][g].tokens, world.case.src.groups[g].tokens_per_block
    due = np.zeros(case.prompt, bool)
    if case.windowed(g):
        due[case.needed_from(g) :] = chunk.is_last
        return due
    before = 0 if chunk.is_first else sum(t < chunk.tokens.begin for t in tokens) // size * size
    after = len(tokens) if chunk.is_last else sum(t < chunk.tokens.end for t in tokens) // size * size
    due[list(tokens[before:after])] = True
    return due


def _held(world: World, plan: PeerPlan, g: int) -> NDArray[np.bool_]:
    """Tokens that both ranks of the plan hold and the destination wants."""
    both = np.zeros((2, world.case.prompt), bool)
    both[0, list(world.src_lists[plan.src_rank][g].tokens)] = True
    listed, size = world.dst_lists[plan.dst_rank][g], world.case.dst.groups[g].tokens_per_block
    both[1, [t for i, t in enumerate(listed.tokens) if listed.slot_of(i // size) >= 0]] = True
    return both[0] & both[1]


def tokens_of(world: World, rank: int, extents: Iterable[Extent]) -> Grids:
    """Extents of a destination rank as (group, part, layer) -> tokens. Fails when two of them overlap."""
    found: Grids = {}
    for extent in extents:
        group = world.dst.storages[rank].groups[extent.layer_group]
        view, attention = group.views[extent.view], isinstance(world.case.model.groups[group.group], Attention)
        layers = {group.layers[position] for position, _, _ in view.entries}
        begin = world.case.begin_dst[group.group]
        assert extent.tokens.begin >= begin, f"{extent} reaches into the prefix of {begin} reused tokens"
        for layer in range(extent.layer_begin, extent.layer_end):
            assert layer in layers, f"{extent} names layer {layer}, which view {extent.view} does not hold"
            grid = found.setdefault(
                (group.group, view.part, layer), np.zeros(world.case.prompt if attention else 1, bool)
            )
            span = slice(extent.tokens.begin, extent.tokens.end) if attention else slice(0, 1)
            assert not grid[span].any(), f"{extent} is reported twice"
            assert attention or (extent.tokens.begin, extent.tokens.end) == (begin, world.case.prompt)
            grid[span] = True
    return found


def compare_need(world: World, need: Need, reported: Mapping[tuple[int, int], Sequence[Extent]]) -> None:
    """Reports are the need, no more and no less, and the manifest is complete with the last of them, not before."""
    for pair in need.extents.keys() | reported.keys():
        left = tokens_of(world, pair[1], need.extents.get(pair, ()))
        right = tokens_of(world, pair[1], reported.get(pair, ()))
        for key in left.keys() | right.keys():
            assert _equal(left.get(key), right.get(key)), (
                f"ranks {pair}, {key}: needed {_list(left.get(key))}, reported {_list(right.get(key))}"
            )
    manifest, rng = Manifest(need), world.case.random("manifest")
    parts = [(pair, extent) for pair, extents in reported.items() for extent in extents]
    rng.shuffle(parts)
    assert manifest.complete == (not parts), "an empty need is complete from the start, any other is not"
    for at, (pair, extent) in enumerate(parts):
        manifest.add(*pair, [extent])
        manifest.add(*pair, [extent])
        last = at == len(parts) - 1
        assert manifest.complete == last, f"complete {manifest.complete} after {at + 1} of {len(parts)} reports"


def _equal(a: NDArray[np.bool_] | None, b: NDArray[np.bool_] | None) -> bool:
    """The same tokens; none is the same as an empty grid."""
    if a is None or b is None:
        return all(one is None or not one.any() for one in (a, b))
    return np.array_equal(a, b)


def _where(mask: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(mask)[0])


def _list(grid: NDArray[np.bool_] | None) -> list[int] | None:
    return None if grid is None else np.flatnonzero(grid).tolist()
