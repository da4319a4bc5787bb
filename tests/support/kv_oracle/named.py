"""Cases written by hand: small models and deployments with a few words each."""

from __future__ import annotations

from dataclasses import replace

from kv_oracle.deployment import Deployment, GroupStorage
from kv_oracle.model import Attention, Model, Part, Recurrent, Section, State
from kv_oracle.request import Case


def attention(layers: int = 4, heads: int = 4, *, bits: int = 16, dim: int = 2, window: int | None = None) -> Model:
    """One group of layers with K and V in one view; `heads` 0 = a latent that is the same on every rank."""
    part = Part(("k", "v"), 2, heads, dim, bits) if heads else Part(("latent",), 1, 0, dim, bits)
    return Model((Attention(tuple(range(layers)), (part,), window),))


def apart(layers: int = 4, heads: int = 4) -> Model:
    """K and V in views of their own."""
    return Model((Attention(tuple(range(layers)), (Part(("k",), 1, heads, 2, 16), Part(("v",), 1, heads, 2, 16))),))


def mamba(layers: int = 3, heads: int = 8, groups: int = 2, *, rows: int = 1, divided: bool = False) -> Model:
    """conv [x|B|C] and SSM heads. `divided`: B and C are cut by tensor parallelism too."""
    bc = tuple(Section(name, groups, 3, copies_of_all=not divided) for name in ("B", "C"))
    conv = State(("conv",), (Section("x", heads, 4), *bc), rows)
    return Model((Recurrent(tuple(range(layers)), (conv, State(("state",), (Section("h", heads, 6),)))),))


def few_units() -> Model:
    """A conv state of 2 units and what every rank holds: more ranks than units leave some with an empty section."""
    return Model(
        (Recurrent((0, 1), (State(("conv",), (Section("x", 2, 4), Section("B", 1, 3, copies_of_all=True))),)),)
    )


def hybrid() -> Model:
    """Full attention, sliding window and recurrent layers, interleaved."""
    full, windowed = attention().groups[0], attention(heads=4, window=9).groups[0]
    assert isinstance(full, Attention)
    assert isinstance(windowed, Attention)
    return Model(
        (
            replace(full, layers=(0, 3, 6)),
            replace(windowed, layers=(1, 4, 7)),
            replace(mamba().groups[0], layers=(2, 5, 8)),
        )
    )


def deploy(
    model: Model,
    *,
    tp: int = 1,
    pp: tuple[int, ...] | int = 1,
    block: int = 4,
    layout: str = "nhd",
    pools: str = "slot_major",
    heads: str = "covering",
    sharding: tuple[str, int] | None = None,
    cp: int = 1,
    dp: int = 1,
    dp_rank: int = 0,
    cuts: str = "one",
) -> Deployment:
    """Every group stored alike. `pp` as a number: stages of equal size, the first larger where it does not divide."""
    layers = len(model.layers)
    stages = pp if isinstance(pp, tuple) else tuple((layers + pp - 1 - i) // pp for i in range(pp))
    storage = tuple(
        GroupStorage(block, pools, (layout,) * len(group.parts), sharding=sharding) for group in model.groups
    )
    order = tuple(range(len(model.groups)))
    return Deployment(stages, tp, dp, cp, heads, storage, order, cuts=cuts, dp_rank=dp_rank)


def prompt_of(
    model: Model,
    src: Deployment,
    dst: Deployment,
    prompt: int = 30,
    *,
    reused_src: int = 0,
    begin_dst: int = 0,
    borders: tuple[int, ...] = (),
) -> Case:
    """A case with one prompt; attention groups begin at `begin_dst` on the destination, recurrent ones at 0."""
    begins = tuple(begin_dst if isinstance(group, Attention) else 0 for group in model.groups)
    return Case(model, src, dst, prompt, reused_src, begins, borders)
