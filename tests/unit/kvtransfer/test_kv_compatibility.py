"""Pairs that can not work get every reason at once, with both values."""

from __future__ import annotations

import dataclasses

import pytest

from kv_storage import MODEL, Shape, Storage, entries, instance, rank_info
from kvtransfer.compatibility import check_compatible
from kvtransfer.errors import PeerIncompatible
from kvtransfer.page_table import AttentionGroup, HeadInterval, MapperKind, PageTable, PoolView
from kvtransfer.peer_plan import build_plan, plan_digest
from kvtransfer.pool_matching import match_pools
from kvtransfer.rank_info import InstanceRole, ModelFingerprint


def context(table: PageTable, **options):
    return instance(rank_info(table), role=InstanceRole.CONTEXT, name="context-0", **options)


def plain(shape: Shape | None = None, layout: str = "slot_major", blocks: int = 6) -> PageTable:
    return Storage(shape or Shape(), layout, blocks).page_table()


def with_view(table: PageTable, index: int, **changes) -> PageTable:
    group = table.groups[0]
    views = list(group.views)
    views[index] = dataclasses.replace(views[index], **changes)
    return dataclasses.replace(table, groups=(dataclasses.replace(group, views=tuple(views)),))


def test_equal_shapes_in_different_layouts_are_compatible():
    for layout in ("slot_major", "layer_major", "slot_major_gaps"):
        assert check_compatible(context(plain()), instance(rank_info(plain(layout=layout, blocks=9)))) == []


def test_every_reason_is_listed_with_both_values():
    other = ModelFingerprint(b"x" * 16, b"y" * 16, "BF16")
    storage = plain(Shape(layers=(0, 1, 2, 3), unit=6))
    peer = instance(rank_info(storage, backend="nixl"), model=other, role=InstanceRole.CONTEXT)
    reasons = {one.field: one for one in check_compatible(context(plain()), peer)}
    assert set(reasons) == {
        "role",
        "model.weights_digest",
        "model.attention_digest",
        "model.kv_dtype",
        "ranks[0].page_table.groups[0].views[0].entries.size of layers 0, 1, 2",
        "ranks[0].page_table.groups[0].views[1].entries.size of layers 0, 1, 2",
        "page_table.layers",
        "ranks[0].agent.backend",
    }
    assert (reasons["model.kv_dtype"].mine, reasons["model.kv_dtype"].yours) == ("F32", "BF16")
    assert (reasons["page_table.layers"].mine, reasons["page_table.layers"].yours) == ("0-2", "0-3")
    assert all(one.remedy for one in reasons.values())


def test_block_sizes_layouts_and_topologies_need_not_be_equal():
    table = plain()
    for peer in (
        instance(rank_info(plain(Shape(tokens_per_block=8)))),
        instance(rank_info(table, 0, 2), rank_info(table, 1, 2)),
        instance(rank_info(with_view(table, 0, mapper_kind=MapperKind.HND))),
    ):
        assert check_compatible(context(table), peer) == []


@pytest.mark.parametrize(
    ("peer", "field", "mine", "yours"),
    [
        (plain(Shape(layers=(0, 1, 2, 3, 7))), "layers", "0-2", "0-3,7"),
        (with_view(plain(), 0, mapper_kind=MapperKind.REPLICATED), "mapper_kind", "NHD", "REPLICATED"),
        (with_view(plain(), 1, kv_heads=HeadInterval(2, 4)), "kv_heads {v} of layers 0-2", "[0, 2)", "[2, 4)"),
        (with_view(plain(), 1, roles=frozenset({"index"})), "roles {v}", "layers 0-2", "layers none"),
        (with_view(plain(), 1, roles=frozenset({"index"})), "roles {index}", "layers none", "layers 0-2"),
        (plain(layout="one_view"), "roles {k}", "layers 0-2", "layers none"),
        (with_view(plain(), 1, entries=entries([0, 1], [32, 96], 32)), "roles {v}", "layers 0-2", "layers 0-1"),
    ],
)
def test_storage_differences_name_field_and_values(peer, field, mine, yours):
    reasons = check_compatible(context(plain()), instance(rank_info(peer)))
    assert any(one.field.endswith(field) and one.mine == mine and one.yours == yours for one in reasons), reasons
    turned = check_compatible(instance(rank_info(peer)), context(plain()))
    assert any(one.field.endswith(field) and one.mine == yours and one.yours == mine for one in turned), turned


def test_sliding_windows_must_agree():
    table = plain()
    windowed = dataclasses.replace(table, groups=(dataclasses.replace(table.groups[0], sliding_window=128),))
    (reason,) = match_pools(table, windowed).incompatibilities
    assert reason.field.endswith("sliding_window")


def test_layers_that_meet_two_peer_groups_are_listed():
    table = plain(Shape(layers=(0, 1, 2, 3)))
    group = table.groups[0]

    def part(layers: tuple[int, ...]) -> AttentionGroup:
        views = tuple(
            dataclasses.replace(view, entries=entries([0, 1], [0, 64] if i == 0 else [32, 96], 32))
            for i, view in enumerate(group.views)
        )
        return AttentionGroup(layers, 4, views)

    split = dataclasses.replace(table, groups=(part((0, 1)), part((2, 3))))
    for a, b, yours in ((table, split, "group 0: layers 0-1, group 1: layers 2-3"), (split, table, "0-3")):
        assert yours in {one.yours for one in match_pools(a, b).incompatibilities}
    assert [(one.mine, one.yours) for one in match_pools(split, split).groups] == [(0, 0), (1, 1)]


def test_groups_may_come_in_another_order():
    table = plain(Shape(layers=(0, 1)))
    first = table.groups[0]
    second = dataclasses.replace(first, global_layer_ids=(2, 3))
    straight = dataclasses.replace(table, groups=(first, second))
    turned = dataclasses.replace(table, groups=(second, first))
    matching = match_pools(straight, turned)
    assert matching.incompatibilities == ()
    assert [(one.mine, one.yours) for one in matching.groups] == [(0, 1), (1, 0)]


def test_views_of_equal_roles_meet_by_layers():
    table = plain()
    group = table.groups[0]
    low = PoolView(frozenset({"k"}), MapperKind.NHD, 0, entries([0, 1], [0, 64], 32), HeadInterval(0, 2))
    high = PoolView(frozenset({"k"}), MapperKind.NHD, 0, entries([2], [128], 32), HeadInterval(0, 2))
    one = dataclasses.replace(table, groups=(dataclasses.replace(group, views=(low, high)),))
    two = dataclasses.replace(table, groups=(dataclasses.replace(group, views=(high, low)),))
    assert match_pools(one, two).groups[0].views == ((0, 1), (1, 0))


def test_planning_an_incompatible_pair_raises_with_the_list():
    a, b = rank_info(plain()), rank_info(plain(Shape(unit=6)))
    with pytest.raises(PeerIncompatible) as caught:
        build_plan(a, b)
    assert len(caught.value.incompatibilities) >= 2
    with pytest.raises(PeerIncompatible):
        plan_digest(context(plain()), instance(b, model=MODEL))
