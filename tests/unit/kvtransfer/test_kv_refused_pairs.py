"""Pairs of instances that can not work get every reason, with both values; requests that do not fit get a PlanError."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kv_oracle.named import attention, deploy, hybrid, mamba
from kv_oracle.tables import build_instance
from kvtransfer.compatibility import check_compatible
from kvtransfer.errors import PeerIncompatible
from kvtransfer.page_table import AttentionGroup, HeadInterval, LayerGroup, PoolView, TokenSharding
from kvtransfer.page_table import ShardingKind as Kind
from kvtransfer.peer_plan import build_instance_plans, build_plan, plan_digest
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import InstanceInfo, InstanceRole

Change = Callable[[int, LayerGroup], LayerGroup]


def side(model, role: InstanceRole, change: Change | None = None, **options) -> InstanceInfo:
    """An instance; `change` gets (flat rank, group) of every layer group."""
    info = build_instance(model, deploy(model, **options), (4,) * len(model.groups), role, role.name.lower()).info
    if change is None:
        return info
    ranks = [
        replace(rank, page_table=replace(rank.page_table, groups=tuple(change(r, g) for g in rank.page_table.groups)))
        for r, rank in enumerate(info.ranks)
    ]
    return replace(info, ranks=tuple(ranks))


def context(model, change: Change | None = None, **options) -> InstanceInfo:
    return side(model, InstanceRole.CONTEXT, change, **options)


def generation(model, change: Change | None = None, **options) -> InstanceInfo:
    return side(model, InstanceRole.GENERATION, change, **options)


def views(group: LayerGroup, change: Callable[[PoolView], PoolView]) -> LayerGroup:
    return replace(group, views=tuple(change(view) for view in group.views))


def heads(*intervals: tuple[int, int]) -> Change:
    """The KV heads of every rank."""
    return lambda rank, group: views(group, lambda view: replace(view, kv_heads=HeadInterval(*intervals[rank])))


def check(a: InstanceInfo, b: InstanceInfo) -> list[Incompatibility]:
    """The reasons, which have to be the same from the other side, and in the error of a plan."""
    reasons = check_compatible(a, b)
    turned = {(one.field, one.yours, one.mine) for one in check_compatible(b, a)}
    assert {(one.field, one.mine, one.yours) for one in reasons} == turned
    assert all(one.remedy for one in reasons)
    assert all(one.mine != one.yours or "head slice" in one.field for one in reasons)
    if reasons:
        for plan in (build_instance_plans, plan_digest):
            with pytest.raises(PeerIncompatible) as caught:
                plan(a, b)
            assert set(caught.value.incompatibilities) <= set(reasons)
    return reasons


def section(name: str, **changes) -> Change:
    def change(_: int, group: LayerGroup) -> LayerGroup:
        return views(
            group,
            lambda view: replace(
                view, sections=tuple(replace(s, **changes) if s.label == name else s for s in view.sections)
            ),
        )

    return change


def windowed(window: int | None) -> Change:
    return lambda _, group: replace(group, sliding_window=window)


def sharded(kind: Kind, grain: int, only: int | None = None) -> Change:
    def change(rank: int, group: LayerGroup) -> LayerGroup:
        return group if only not in (None, rank) else replace(group, token_sharding=TokenSharding(kind, grain))

    return change


FOUR, EIGHT, STATE = attention(heads=4), attention(heads=8), mamba()

REFUSED = {
    "a hole between the heads of the source": (
        context(FOUR, heads((0, 2), (3, 5)), tp=2, heads="balanced"),
        generation(FOUR, tp=2),
        "kv_heads",
        "no rank holds [2, 3)",
        "[2, 4)",
    ),
    "overlapping heads that leave a hole": (
        context(attention(heads=9), heads((0, 5), (1, 5), (6, 9)), tp=3, heads="covering"),
        generation(attention(heads=9)),
        "kv_heads",
        "no rank holds [5, 6)",
        "[0, 9)",
    ),
    "a hole between the heads of the destination": (
        context(FOUR),
        generation(FOUR, heads((0, 2), (3, 5)), tp=2),
        "kv_heads {k, v} of layers 0-3",
        "[0, 4)",
        "[0, 2), [3, 5)",
    ),
    "more heads than the destination has": (context(EIGHT), generation(FOUR), "kv_heads", "[0, 8)", "[0, 4)"),
    "fewer layers": (context(attention(layers=3)), generation(FOUR), "page_table.layers", "0-2", "0-3"),
    "other head sizes": (
        context(attention(dim=4)),
        generation(attention(dim=2)),
        "entries.size of layers 0, 1, 2, 3",
        "2 buffers of 64, 64 bits a token and head",
        "2 buffers of 32, 32 bits a token and head",
    ),
    "other element sizes": (
        context(attention(bits=8)),
        generation(attention(bits=16)),
        "entries.size",
        " 16 bits",
        " 32 bits",
    ),
    "latent against heads": (
        context(attention(heads=0)),
        generation(FOUR),
        "page_table.roles {latent}",
        "layers 0-3",
        "layers none",
    ),
    "other windows": (
        context(FOUR, windowed(9)),
        generation(FOUR, windowed(10)),
        "groups[0].sliding_window",
        "9",
        "10",
    ),
    "a window on one side": (context(FOUR, windowed(9)), generation(FOUR), "sliding_window", "9", "full attention"),
    "ranks that shard tokens differently": (
        context(FOUR, sharded(Kind.ZIGZAG, 4, only=1), cp=2, sharding=("interleaved", 4)),
        generation(FOUR),
        "token_sharding",
        "ZIGZAG by 4",
        "INTERLEAVED by 4 on rank 0",
    ),
    "sections of other names": (
        context(STATE, section("B", label="Z")),
        generation(STATE),
        "views[0].sections",
        "x, Z, C",
        "x, B, C",
    ),
    "more rows": (context(mamba(rows=2)), generation(mamba(rows=1)), "views[0].rows", "2", "1"),
    "no recurrent state": (context(FOUR), generation(hybrid()), "page_table.layers", "0-3", "0-8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_field_and_both_values(name):
    a, b, field, mine, yours = REFUSED[name]
    reasons = check(a, b)
    assert any(field in one.field and mine in one.mine and yours in one.yours for one in reasons), reasons


def test_units_of_other_sizes_are_named():
    other = replace(STATE.groups[0].parts[0].sections[0], unit_bytes=5)
    conv = replace(STATE.groups[0].parts[0], sections=(other, *STATE.groups[0].parts[0].sections[1:]))
    model = replace(STATE, groups=(replace(STATE.groups[0], parts=(conv, STATE.groups[0].parts[1])),))
    (reason,) = check(context(STATE), generation(model))
    assert (reason.field.rpartition(".views")[2], reason.mine, reason.yours) == ("[0].sections[x].unit_bytes", "4", "5")


def test_all_reasons_come_in_one_go():
    def spoil(rank: int, group: LayerGroup) -> LayerGroup:
        return heads((0, 2), (3, 5))(rank, windowed(7)(rank, group))

    a = context(attention(layers=3, dim=4), spoil, tp=2)
    b = generation(attention(layers=4, dim=2), windowed(8), tp=2)
    b = replace(b, model=replace(b.model, kv_dtype="F16", quantization="fp8"))
    fields = " ".join(one.field for one in check_compatible(a, b))
    for part in (
        "model.kv_dtype",
        "model.quantization",
        "sliding_window",
        "entries.size",
        "page_table.layers",
        "kv_heads",
    ):
        assert part in fields, part


@pytest.mark.parametrize("name", ["weights_digest", "attention_digest", "scale_digest", "draft_digest"])
def test_the_same_shape_is_not_the_same_model(name):
    a, b = context(FOUR), generation(FOUR)
    b = replace(b, model=replace(b.model, **{name: b"another"}))
    (reason,) = check_compatible(a, b)
    assert reason.field == f"model.{name}"
    assert reason.yours == b"another".hex()


def four_bit(heads_: int, tokens: int, layout: str, **options):
    """3 elements of 4 bits a head: 12 bits, so a token of one head is a byte and a half."""
    model = attention(heads=heads_, dim=2, bits=8)

    def shrink(_: int, group: LayerGroup) -> LayerGroup:
        assert isinstance(group, AttentionGroup)
        return views(
            group,
            lambda view: replace(
                view,
                entries=replace(view.entries, size=(view.entries.size.astype(np.int64) * 12 // 16).astype(np.uint32)),
            ),
        )

    return shrink, model, {"block": tokens, "layout": layout, **options}


@pytest.mark.parametrize(
    ("src", "dst", "works"),
    [
        (four_bit(2, 4, "nhd"), four_bit(2, 4, "nhd"), True),
        (four_bit(2, 4, "hnd"), four_bit(2, 4, "hnd", tp=2), True),  # 4 tokens of a head are 6 bytes
        (four_bit(4, 4, "nhd"), four_bit(4, 4, "nhd", tp=2), True),  # 2 heads of a token are 3 bytes
        (four_bit(2, 4, "nhd"), four_bit(2, 4, "nhd", tp=2), False),  # 1 head of a token is not whole bytes
        (four_bit(2, 4, "hnd"), four_bit(2, 4, "nhd"), False),
    ],
)
def test_head_slices_of_small_elements_are_whole_bytes_or_refused_with_the_sizes(src, dst, works):
    (shrink, model, options), (shrink_too, model_too, options_too) = src, dst
    reasons = check(context(model, shrink, **options), generation(model_too, shrink_too, **options_too))
    assert bool(reasons) != works, reasons
    for reason in reasons:
        assert "bytes of 4 tokens" in reason.mine
        assert "bytes of 4 tokens" in reason.yours


def test_a_plan_of_two_ranks_that_can_not_meet_says_so():
    a, b = context(attention(dim=4)), generation(attention(dim=2))
    with pytest.raises(PeerIncompatible, match=r"entries\.size"):
        build_plan(a.ranks[0], b.ranks[0])
