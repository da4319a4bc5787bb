"""Draws cases. Small dimensions on purpose: what matters is how borders of heads, blocks, chunks and layers meet."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from kv_oracle.choose import Chooser, from_seed
from kv_oracle.deployment import Deployment, GroupStorage
from kv_oracle.model import Attention, Model, Part, Recurrent, Section, State
from kv_oracle.request import Case

TENSOR_PARALLEL = (1, 2, 3, 4, 6, 8, 9)
TENSOR_PARALLEL_DRAWN = (1, 2, *TENSOR_PARALLEL)  # few ranks more often: they leave room for the other axes
BLOCK_SIZES = (4, 5, 6, 8, 12, 16, 32, 64)
ARRANGEMENTS = ("slot_major", "layer_major", "part_pools", "layer_pools", "interleaved")
MAX_PAIRS = 40  # source ranks x destination ranks that hold the request, but for tp x tp alone
MAX_WORLD = 12  # ranks of an instance, but for one attention-dp group alone
MAX_ATOMS = 1500  # (layer, buffer, head, token) of the whole prompt


def case_from(entropy: bytes) -> Case:
    """The case that these bytes choose."""
    return draw_case(Chooser(entropy))


def seeded_case(seed: int) -> Case:
    """The same case for the same seed."""
    return case_from(from_seed(seed))


def draw_case(choose: Chooser) -> Case:
    """Two thirds of the cases are hard on purpose: reuse on both sides, unequal blocks, a chunk off both grids. Of the
    others half store the cache alike on both sides, so that whole blocks move."""
    mode = choose.one_of(("hard", "hard", "hard", "hard", "free", "alike"))
    hard = mode == "hard"
    model = _model(choose)
    src_tp = choose.one_of(TENSOR_PARALLEL_DRAWN)
    dst_tp = src_tp if mode == "alike" else choose.one_of(TENSOR_PARALLEL_DRAWN)
    per_token = sum(_atoms_per_token(group) for group in model.groups)
    prompt = choose.between(9 if hard else 1, max(12, min(140, MAX_ATOMS // max(1, per_token))))
    sizes = [s for s in BLOCK_SIZES if s == 4 or s < prompt] if hard else list(BLOCK_SIZES)
    src_blocks = tuple(choose.one_of(sizes) for _ in model.groups)
    other = [[s for s in sizes if s != mine] if hard else sizes for mine in src_blocks]
    dst_blocks = src_blocks if mode == "alike" else tuple(choose.one_of(options) for options in other)
    room = MAX_PAIRS // (src_tp * dst_tp)
    mine = choose.one_of((max(1, room // 2), math.isqrt(room), room))
    src = _deployment(choose, model, src_tp, src_blocks, mine)
    dst = _deployment(choose, model, dst_tp, dst_blocks, room // (len(src.pp) * src.cp))
    if mode == "alike":
        dst = _alike(src, dst)
    border = _borders(choose, prompt, (*src_blocks, *dst_blocks), hard)
    low = 1 if hard else 0
    begin = tuple(
        choose.one_of((0, prompt)) if isinstance(group, Recurrent) else choose.between(low, prompt - hard)
        for group in model.groups
    )
    return Case(
        model=model,
        src=src,
        dst=dst,
        prompt=prompt,
        reused_src=choose.between(low, (border[0] if border else prompt) - 1),
        begin_dst=begin,
        borders=border,
        held_src=tuple(choose.one_of(("all", "late", "holes")) for _ in model.groups),
        holes_dst=choose.one_of((False, False, True)),
        ids=choose.between(0, 999),
        order=_orders(choose, hard),
    )


def _orders(choose: Chooser, hard: bool) -> tuple[str, str]:
    options = ("shuffled", "rotated") if hard else ("ascending", "shuffled", "rotated")
    return choose.one_of(options), choose.one_of(options)


def _alike(src: Deployment, dst: Deployment) -> Deployment:
    """The destination with the source's pools and layouts; token shards stay its own."""
    groups = tuple(replace(a, sharding=b.sharding) for a, b in zip(src.groups, dst.groups, strict=True))
    return replace(dst, groups=groups)


def _borders(choose: Chooser, prompt: int, block_sizes: tuple[int, ...], hard: bool) -> tuple[int, ...]:
    off = [t for t in range(2, prompt) if all(t % size for size in block_sizes)] if hard else []
    if off:
        first = choose.one_of(off)
        rest = [choose.between(1, prompt - 1)] if choose.one_of((False, True)) and prompt > 1 else []
        found = {first, *(t for t in rest if t > first)}
    else:
        found = {choose.between(1, prompt - 1) for _ in range(choose.between(0, 2))} if prompt > 1 else set[int]()
    return tuple(sorted(found))


def _atoms_per_token(group: Attention | Recurrent) -> int:
    if isinstance(group, Recurrent):
        return 0
    return len(group.layers) * sum(part.buffers * max(1, part.heads) for part in group.parts)


def _model(choose: Chooser) -> Model:
    layers = choose.between(1, 12)
    count = min(layers, choose.one_of((1, 1, 2, 3)))
    kinds = [choose.one_of(("full", "full", "window", "recurrent")) for _ in range(count)]
    owner = [*range(count), *(choose.between(0, count - 1) for _ in range(layers - count))]
    ids = tuple(range(layers)) if choose.one_of((True, False)) else tuple(2 * i + 3 for i in range(layers))
    members = [tuple(ids[i] for i in range(layers) if owner[i] == g) for g in range(count)]
    return Model(tuple(_group(choose, kind, mine) for kind, mine in zip(kinds, members, strict=True)))


def _group(choose: Chooser, kind: str, layers: tuple[int, ...]) -> Attention | Recurrent:
    if kind == "recurrent":
        return Recurrent(layers, _states(choose))
    window = choose.between(1, 40) if kind == "window" else None
    return Attention(layers, _parts(choose, max_heads=16 if len(layers) <= 4 else 6), window)


def _parts(choose: Chooser, max_heads: int) -> tuple[Part, ...]:
    heads = choose.between(1, max_heads)
    bits = choose.one_of((4, 8, 16, 32))
    dim = {4: 2, 8: 1, 16: 1, 32: 1}[bits] * choose.between(1, 3)
    kind = choose.one_of(("pair", "apart", "fused", "latent", "indexed"))
    if kind == "pair":
        return (Part(("k", "v"), 2, heads, dim, bits),)
    if kind == "apart":
        return (Part(("k",), 1, heads, dim, bits), Part(("v",), 1, heads, dim, bits))
    if kind == "fused":
        return (Part(("kv",), 1, heads, dim, bits),)
    latent = Part(("latent",), 1, 0, dim, bits)
    return (latent,) if kind == "latent" else (latent, Part(("index",), 1, 0, 4, 8))


def _states(choose: Chooser) -> tuple[State, ...]:
    """conv [x|B|C] and the heads of the state; B and C exist once on every rank where they do not divide."""
    heads, groups, width = choose.between(1, 12), choose.between(1, 3), choose.between(1, 2)
    bc = tuple(Section(name, groups, 2 * width, copies_of_all=True) for name in ("B", "C"))
    conv = State(("conv",), (Section("x", heads, width), *bc), rows=choose.one_of((1, 1, 2)))
    state = State(("state",), (Section("h", heads, choose.between(1, 4)),))
    if choose.one_of((True, True, False)):
        return conv, state
    return conv, state, State(("extra",), (Section("all", 1, 5, copies_of_all=True),))


def _deployment(choose: Chooser, model: Model, tp: int, block_sizes: tuple[int, ...], room: int) -> Deployment:
    """A deployment in which at most `room` x tp ranks hold the request."""
    layers = len(model.layers)
    cp = choose.one_of((1, 2)) if room >= 2 else 1
    most = min(4, layers, max(1, room // cp))
    stages = choose.one_of((*range(1, most + 1), most))
    heads = [part.heads for group in model.groups if isinstance(group, Attention) for part in group.parts if part.heads]
    heads += [s.units for g in model.groups if isinstance(g, Recurrent) for p in g.parts for s in p.sections]
    dp = choose.one_of([n for n in (1, 1, 2, 3, 4) if n == 1 or n * tp * stages * cp <= MAX_WORLD])
    style = choose.one_of(("balanced", "covering")) if min(heads, default=1) >= tp else "covering"
    storages = tuple(
        GroupStorage(
            tokens_per_block=size,
            arrangement=choose.one_of(ARRANGEMENTS),
            layouts=tuple(choose.one_of(("hnd", "nhd")) for _ in group.parts),
            gap=choose.one_of((0, 0, 3)),
            reverse=choose.one_of((False, True)),
            spare_slots=choose.between(0, 3),
            sharding=_sharding(choose) if cp > 1 else None,
            draft_slack=choose.one_of((0, 0, 2)),
        )
        for group, size in zip(model.groups, block_sizes, strict=True)
    )
    order = tuple(range(len(model.groups)))
    return Deployment(
        pp=_split(choose, layers, stages),
        tp=tp,
        dp=dp,
        cp=cp,
        heads=style,
        groups=storages,
        group_order=order if choose.one_of((True, False)) else order[::-1],
        cuts=choose.one_of(("one", "pool", "many")),
        shared=choose.one_of(("", "", "beside", "same")) if len(model.groups) > 1 else "",
        dp_rank=choose.between(0, dp - 1),
    )


def _sharding(choose: Chooser) -> tuple[str, int] | None:
    kind = choose.one_of((None, "contiguous", "zigzag", "interleaved"))
    return (kind, choose.one_of((1, 2, 3, 4, 8))) if kind else None


def _split(choose: Chooser, layers: int, stages: int) -> tuple[int, ...]:
    """Layers per stage, each at least one, uneven."""
    borders = sorted(_distinct(choose, stages - 1, layers - 1))
    ends = [0, *(border + 1 for border in borders), layers]
    return tuple(b - a for a, b in itertools.pairwise(ends))


def _distinct(choose: Chooser, count: int, limit: int) -> set[int]:
    free = list(range(limit))
    return {free.pop(choose.between(0, len(free) - 1)) for _ in range(count)}
