"""A plan as text for people: who sends what to whom, in how many bytes and runs, and a drawing when it is small.

context (pp2 tp1) -> generation (tp2): layers 0-3, heads 0-3
  rank 0 -> rank 1   group 0 {key} layers 0-1 heads 2-3   …
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PeerIncompatible
from kvtransfer.page_table import AttentionGroup, MapperKind
from kvtransfer.peer_plan import build_instance_plans
from kvtransfer.pool_matching import layers_text, roles_text
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.holdings import Part
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import TokenRange
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.transfer import Transfer

MOST_DRAWN_LAYERS = 16
MOST_DRAWN_UNITS = 16


def explain(
    context: InstanceInfo, generation: InstanceInfo, tokens: TokenRange | Chunk, *, seed_compat: bool = False
) -> str:
    """Sizes are for a prompt of `tokens` in blocks that nobody has shuffled. Incompatible pairs are explained by the
    list of reasons. Raises nothing on valid instances."""
    lines = [f"{_instance_text(context)} -> {_instance_text(generation)}"]
    try:
        plans = build_instance_plans(context, generation, seed_compat=seed_compat)
    except PeerIncompatible as error:
        return "\n".join([*lines, "can not work together:", *(f"  {one}" for one in error.incompatibilities)])
    chunk = Chunk.of(tokens)
    lines.append(f"tokens [{chunk.prompt.begin}, {chunk.prompt.end})")
    for plan in plans:
        transfer = planned_transfer(plan, chunk)
        dp = f" (dp {plan.src_dp} -> {plan.dst_dp})" if _dp(context, generation) else ""
        lines.append(f"  rank {plan.src_rank} -> rank {plan.dst_rank}{dp}: {_size_text(transfer)}")
        lines += [f"    {line}" for group in plan.groups for line in _group_lines(group)]
    return "\n".join([*lines, *_drawings(plans)])


def _instance_text(info: InstanceInfo) -> str:
    pp, tp, cp, dp = info.ranks[0].topology.sizes
    sizes = [f"{name}{size}" for name, size in (("pp", pp), ("tp", tp), ("cp", cp), ("dp", dp)) if size > 1]
    return f"{info.instance_id} ({' '.join(sizes) or 'one rank'})"


def _dp(*instances: InstanceInfo) -> bool:
    return any(info.ranks[0].topology.dp_size > 1 for info in instances)


def planned_transfer(plan: PeerPlan, chunk: Chunk) -> Transfer:
    """The chunk with blocks 0, 1, 2 … on either side. A pool too small for the prompt starts over on the source; on the
    destination it can not, so the size is that of what fits."""
    src = {group.src.number: _ids(group, group.src.blocks, chunk, source=True) for group in plan.groups}
    dst = {group.dst.number: _ids(group, group.dst.blocks, chunk, source=False) for group in plan.groups}
    return plan.resolve(src, dst, chunk)


def _ids(group: GroupPlan, blocks: int, chunk: Chunk, *, source: bool) -> NDArray[np.int32]:
    if group.recurrent:
        return np.zeros(1, np.int32)
    side = group.src if source else group.dst
    begin = 0 if source else chunk.prompt.begin
    prompt = chunk.prompt.end
    low, high = side.shard.local_count(begin, prompt), side.shard.local_count(prompt, prompt)
    count = -(-high // side.block) - low // side.block if high > low else 0
    ids = np.arange(count)
    return np.where(ids < blocks, ids, -1).astype(np.int32) if not source else (ids % blocks).astype(np.int32)


def _size_text(transfer: Transfer) -> str:
    runs = transfer.fragments
    size = f"{transfer.nbytes:,} bytes in {runs:,} {'run' if runs == 1 else 'runs'}"
    return size + (f" of {transfer.nbytes // runs:,} bytes on average" if runs else "")


def _group_lines(group: GroupPlan) -> list[str]:
    """One line for each (view, section, heads) with its layers."""
    src, dst = group.source.relation.src, group.source.relation.dst
    atoms, found = group.source.atoms, defaultdict[tuple[int, int, int, int], list[int]](list)
    for i in range(len(atoms)):
        a, b = int(src.part[atoms.src_row[i]]), int(dst.part[atoms.dst_row[i]])
        found[a, b, int(atoms.lo[i]), int(atoms.hi[i])].append(int(dst.layer[atoms.dst_row[i]]))
    merged: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for (a, b, lo, hi), layers in found.items():
        mine, yours = src.parts[a], dst.parts[b]
        merged[_what(mine), _units(yours, lo, hi), _how(group, mine, yours)] += layers
    return [
        f"group {group.src.number} -> {group.dst.number} {what} layers {layers_text(layers)}{units}: {how}"
        for (what, units, how), layers in merged.items()
    ]


def _what(part: Part) -> str:
    recurrent, roles, _ = part.what
    return ("state " if recurrent else "") + roles_text(roles)


def _units(part: Part, lo: int, hi: int) -> str:
    if part.kind is MapperKind.REPLICATED:
        return ""
    name = part.what[2] or "heads"
    return f" {name} [{lo}, {hi})"


def _how(group: GroupPlan, mine: Part, yours: Part) -> str:
    kind = mine.kind.name.lower()
    if mine.kind is not yours.kind:
        kind = f"{kind} to {yours.kind.name.lower()}"
    if not isinstance(group.group, AttentionGroup):
        return kind
    sizes = f"blocks of {group.src.block}"
    if not group.aligned_blocks:
        sizes = f"blocks of {group.src.block} to {group.dst.block}"
    window = group.group.sliding_window
    return f"{kind}, {sizes}" + (f", window {window}" if window else "")


def _drawings(plans: Sequence[PeerPlan]) -> list[str]:
    """Writers over layers x units of each destination rank's first view, where that fits on a screen."""
    lines: list[str] = []
    for rank in sorted({plan.dst_rank for plan in plans}):
        chosen = [plan for plan in plans if plan.dst_rank == rank]
        lines += _drawing(rank, chosen)
    return ["", "writer of every layer and head (first view of each rank)", *lines] if lines else []


def _drawing(rank: int, plans: Sequence[PeerPlan]) -> list[str]:
    cells: dict[tuple[int, int], str] = {}
    for plan in plans:
        for group in plan.groups:
            cells |= {} if group.dst.number else _cells(group, plan.src_rank)
    layers, units = (sorted({place[i] for place in cells}) for i in (0, 1))
    if not cells or len(layers) > MOST_DRAWN_LAYERS or len(units) > MOST_DRAWN_UNITS:
        return []
    head = f"  rank {rank}   head " + " ".join(f"{unit:>2}" for unit in units)
    rows = [
        f"{'layer':>14} {layer:>2} " + " ".join(f"{cells.get((layer, unit), '.'):>2}" for unit in units)
        for layer in layers
    ]
    return [head, *rows]


def _cells(group: GroupPlan, writer: int) -> dict[tuple[int, int], str]:
    dst, atoms = group.source.relation.dst, group.source.atoms
    cells: dict[tuple[int, int], str] = {}
    for i in range(len(atoms)):
        part = dst.parts[int(dst.part[atoms.dst_row[i]])]
        if part.view == 0 and part.order == 0:
            layer = int(dst.layer[atoms.dst_row[i]])
            cells |= {(layer, unit): str(writer) for unit in range(int(atoms.lo[i]), int(atoms.hi[i]))}
    return cells
