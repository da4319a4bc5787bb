"""What a run of cases covered: counts per cell, cells that stayed empty, share of the cases that are hard all over."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import TYPE_CHECKING

from kv_oracle.deployment import head_interval
from kv_oracle.draw import ARRANGEMENTS, BLOCK_SIZES, TENSOR_PARALLEL
from kv_oracle.model import Attention

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kv_oracle.deployment import Deployment, GroupStorage
    from kv_oracle.expected import Lists
    from kv_oracle.request import Case
    from kv_oracle.world import World

JOINT_SHARE = 0.3
KINDS: dict[tuple[str, ...], str] = {
    ("k", "v"): "pair",
    ("k",): "apart",
    ("v",): "apart",
    ("kv",): "fused",
    ("latent",): "latent",
    ("index",): "index",
}
SHARDINGS = ("one", "copies", "contiguous", "zigzag", "interleaved")
LAYOUTS = ("hnd", "nhd")
CUTS = ("one", "pool", "many")

# axis -> every cell that a run must reach
CELLS: dict[str, list[str]] = {
    "tp -> tp": [f"{a}->{b}" for a, b in product(TENSOR_PARALLEL, repeat=2)],
    "pp -> pp": [f"{a}->{b}" for a, b in product(range(1, 5), repeat=2)],
    "dp source": [str(n) for n in range(1, 5)],
    "dp destination": [str(n) for n in range(1, 5)],
    "tokens over cp": [f"{a}->{b}" for a, b in product(SHARDINGS, repeat=2)],
    "layers": [str(n) for n in range(1, 13)],
    "kv heads": [str(n) for n in range(1, 17)],
    "heads on several ranks": [f"{a}->{b}" for a, b in product(("once", "copies"), repeat=2)],
    "cached": sorted(set(KINDS.values())),
    "bits": ["4", "8", "16", "32"],
    "layout": [f"{a}->{b}" for a, b in product(LAYOUTS, repeat=2)],
    "block size source": [str(n) for n in BLOCK_SIZES],
    "block size destination": [str(n) for n in BLOCK_SIZES],
    "block sizes": ["equal", "multiple", "neither divides"],
    "pools": [f"{a}->{b}" for a, b in product(ARRANGEMENTS, repeat=2)],
    "pool of all groups": [f"{a}->{b}" for a, b in product(("no", "beside", "same"), repeat=2)],
    "registered": [f"{a}->{b}" for a, b in product(CUTS, repeat=2)],
    "window": ["none", "shorter than the prompt", "not shorter"],
    "state": ["none", "recurrent", "recurrent, rows", "recurrent, opaque"],
    "reused prefix": [f"{a}->{b}" for a, b in product(("none", "some"), repeat=2)],
    "chunks": ["1", "2", "3"],
    "chunk border": ["off both grids", "elsewhere"],
    "block ids": [f"{a}->{b}" for a, b in product(("shuffled", "rotated", "ascending"), repeat=2)],
    "source lists": ["all", "late", "holes"],
    "destination holes": ["False", "True"],
}


class Coverage:
    """Collects cases."""

    def __init__(self) -> None:
        self._cells: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.cases = 0
        self.joint = 0

    def add(self, world: World) -> None:
        """Counts one case."""
        self.cases += 1
        for axis, cell in {*cells_of(world)}:
            self._cells[axis][cell] += 1
        self.joint += is_joint(world)

    @property
    def empty(self) -> list[str]:
        """Cells that no case reached."""
        return [f"{axis}: {cell}" for axis, cells in CELLS.items() for cell in cells if not self._cells[axis][cell]]

    @property
    def joint_share(self) -> float:
        """Share of the cases with everything at once: see `is_joint`."""
        return self.joint / max(1, self.cases)

    def table(self) -> str:
        """For people: one axis a line."""
        lines = [
            f"{self.cases} cases, {self.joint_share:.0%} with reuse on both sides, unequal blocks, a chunk border off"
        ]
        lines[0] += " both grids and permuted block ids at once"
        for axis, cells in CELLS.items():
            lines.append(f"  {axis:<24}" + "  ".join(f"{cell} {self._cells[axis][cell]}" for cell in cells))
        return "\n".join(lines)


def is_joint(world: World) -> bool:
    """Reused prefix on each side, unequal block sizes, a chunk border off both grids, permuted block ids, at once."""
    case = world.case
    return (
        case.reused_src > 0
        and any(case.begin_dst[g] > 0 for g, _, _ in _attention(case))
        and any(a.tokens_per_block != b.tokens_per_block for _, a, b in _attention(case))
        and any(_off_grids(case, a, b) for _, a, b in _attention(case))
        and all(_permuted(lists) for lists in (world.src_lists, world.dst_lists))
    )


def cells_of(world: World) -> Iterator[tuple[str, str]]:
    """(axis, cell) of one case; a case may lie in several cells of an axis."""
    case, src, dst = world.case, world.case.src, world.case.dst
    yield "tp -> tp", f"{src.tp}->{dst.tp}"
    yield "pp -> pp", f"{len(src.pp)}->{len(dst.pp)}"
    yield "dp source", str(src.dp)
    yield "dp destination", str(dst.dp)
    yield "layers", str(len(case.model.layers))
    yield "pool of all groups", f"{src.shared or 'no'}->{dst.shared or 'no'}"
    yield "registered", f"{src.cuts}->{dst.cuts}"
    yield "reused prefix", f"{_some(case.reused_src)}->{_some(max(case.begin_dst))}"
    yield "chunks", str(len(case.chunks))
    yield "block ids", "->".join(case.order)
    yield "destination holes", str(case.holes_dst)
    for held in case.held_src:
        yield "source lists", held
    for group in case.model.groups:
        if not isinstance(group, Attention):
            yield "state", "recurrent, rows" if any(part.rows > 1 for part in group.parts) else "recurrent"
            if any(part.opaque for part in group.parts):
                yield "state", "recurrent, opaque"
    if all(isinstance(group, Attention) for group in case.model.groups):
        yield "state", "none"
    for g, a, b in _attention(case):
        yield from _group_cells(case, g, a, b)


def _group_cells(case: Case, g: int, a: GroupStorage, b: GroupStorage) -> Iterator[tuple[str, str]]:
    group, small, large = case.model.groups[g], *sorted((a.tokens_per_block, b.tokens_per_block))
    assert isinstance(group, Attention)
    yield "tokens over cp", f"{_sharding(case.src, a)}->{_sharding(case.dst, b)}"
    yield "block size source", str(a.tokens_per_block)
    yield "block size destination", str(b.tokens_per_block)
    yield "block sizes", "equal" if small == large else "neither divides" if large % small else "multiple"
    if not case.src.shared and not case.dst.shared:
        yield "pools", f"{a.arrangement}->{b.arrangement}"
    yield "chunk border", "off both grids" if _off_grids(case, a, b) else "elsewhere"
    yield "window", "none" if group.window is None else "shorter than the prompt" if case.windowed(g) else "not shorter"
    for p, part in enumerate(group.parts):
        yield "cached", KINDS[part.roles]
        yield "bits", str(part.bits)
        if part.heads:
            yield "kv heads", str(part.heads)
            yield "layout", f"{a.layouts[p]}->{b.layouts[p]}"
            yield "heads on several ranks", "->".join(_copies(side, part.heads) for side in (case.src, case.dst))


def _attention(case: Case) -> Iterable[tuple[int, GroupStorage, GroupStorage]]:
    for g, group in enumerate(case.model.groups):
        if isinstance(group, Attention):
            yield g, case.src.groups[g], case.dst.groups[g]


def _some(count: int) -> str:
    return "some" if count else "none"


def _sharding(side: Deployment, storage: GroupStorage) -> str:
    if side.cp == 1:
        return "one"
    return storage.sharding[0] if storage.sharding else "copies"


def _copies(side: Deployment, heads: int) -> str:
    held = [h for rank in range(side.tp) for h in range(*head_interval(side.heads, heads, side.tp, rank))]
    return "copies" if len(held) > heads else "once"


def _off_grids(case: Case, a: GroupStorage, b: GroupStorage) -> bool:
    return any(border % a.tokens_per_block and border % b.tokens_per_block for border in case.borders)


def _permuted(lists: dict[int, Lists]) -> bool:
    return any(list(one.slots) != sorted(one.slots) for by_group in lists.values() for one in by_group.values())
