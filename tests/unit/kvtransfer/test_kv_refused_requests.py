"""Block lists, token ranges and chunks that do not fit a plan are refused before an address is computed."""

from __future__ import annotations

import numpy as np
import pytest

from kv_oracle.named import attention, deploy, hybrid, mamba
from kv_oracle.tables import build_instance
from kvtransfer import packing
from kvtransfer.errors import PlanError
from kvtransfer.peer_plan import PeerPlan, build_instance_plans
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole
from kvtransfer.windows import Chunk

SLOTS = 8
WINDOW = attention(window=6)


def plan_of(model=None, src=None, dst=None) -> PeerPlan:
    """Rank 0 to rank 0. Source blocks of 4 tokens, destination blocks of 6."""
    model = model or attention()
    sides = (deploy(model, **{"block": 4, **(src or {})}), deploy(model, **{"block": 6, **(dst or {})}))
    roles = (InstanceRole.CONTEXT, InstanceRole.GENERATION)
    slots = (SLOTS,) * len(model.groups)
    a, b = (build_instance(model, one, slots, role, role.name).info for one, role in zip(sides, roles, strict=True))
    return build_instance_plans(a, b)[0]


def ids(*blocks: int) -> dict[int, np.ndarray]:
    return {0: np.array(blocks, np.int32)}


@pytest.mark.parametrize(
    ("src", "dst", "tokens", "begins", "problem"),
    [
        (ids(0, 1, 2), ids(0, SLOTS), (0, 12), {}, f"names block {SLOTS}"),
        (ids(0, 1, 2), ids(0, -2), (0, 12), {}, "names block -2"),
        (ids(0, 1, SLOTS), ids(0, 1), (0, 12), {}, f"names block {SLOTS}"),
        (ids(0, -7, 1), ids(0, 1), (0, 12), {}, "names block -7"),
        (ids(0, 1, 2), ids(3, 3), (0, 12), {}, "names block 3 twice"),
        (ids(0, 1, 2), ids(3), (0, 12), {}, "lists 1 blocks"),
        (ids(0, 1, 2), ids(3, 4, 5), (0, 12), {}, "lists 3 blocks"),
        (ids(0, 1, 2), ids(3, 4), (0, 12), {"dst_begins": {0: 6}}, "lists 2 blocks"),
        (ids(0, 1), ids(3, 4), (0, 12), {}, "lists 2 blocks"),
        (ids(0, 1), ids(3, 4), (0, 12), {"src_begins": {0: 4}}, "from token 4"),
        (ids(0, -1, 2), ids(3, 4), (0, 12), {}, "no longer holds block 1"),
        (ids(0, 1, 2), {}, (0, 12), {}, "no destination blocks for layer group 0"),
        ({}, ids(0, 1), (0, 12), {}, "no source blocks for layer group 0"),
        (ids(0, 1, 2), ids(0, 1), (0, 1 << 31), {}, "2\\^31"),
    ],
)
def test_bad_lists_are_refused(src, dst, tokens, begins, problem):
    with pytest.raises(PlanError, match=problem):
        plan_of().instantiate(src, dst, TokenRange(*tokens), **begins)


@pytest.mark.parametrize("shape", [np.zeros(2, np.int64), np.zeros((2, 1), np.int32), np.zeros(2, np.float32)])
def test_lists_have_one_type(shape):
    for lists in ((ids(0, 1, 2), {0: shape}), ({0: shape}, ids(0, 1))):
        with pytest.raises(PlanError, match="int32"):
            plan_of().instantiate(*lists, TokenRange(0, 12))


def test_a_receiver_can_check_its_own_lists():
    plan = plan_of()
    plan.check_destination(ids(1, 0), TokenRange(0, 12))
    plan.check_destination(ids(1), TokenRange(0, 12), {0: 6})
    for lists in (ids(1), ids(1, 1), ids(1, SLOTS), {}):
        with pytest.raises(PlanError):
            plan.check_destination(lists, TokenRange(0, 12))


@pytest.mark.parametrize(
    ("dst", "problem"), [(ids(), "lists 0 blocks"), (ids(0, 1), "lists 2 blocks"), (ids(SLOTS), f"names block {SLOTS}")]
)
def test_a_recurrent_group_lists_one_slot(dst, problem):
    plan = plan_of(mamba())
    assert plan.instantiate(ids(0), ids(1), TokenRange(0, 12)).nbytes > 0
    with pytest.raises(PlanError, match=problem):
        plan.instantiate(ids(0), dst, TokenRange(0, 12))


def test_a_window_that_fell_out_of_the_source_is_noticed():
    plan, two = plan_of(WINDOW), ids(0, 1)
    assert plan.instantiate(ids(-1, 0, 1), two, TokenRange(0, 12)).nbytes > 0
    with pytest.raises(PlanError, match="no longer holds block 2"):
        plan.instantiate(ids(-1, 0, -1), two, TokenRange(0, 12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chunk(TokenRange(0, 13), TokenRange(0, 12)),
        lambda: Chunk(TokenRange(0, 11), TokenRange(0, 12)),
        lambda: Chunk(TokenRange(5, 4), TokenRange(0, 12), is_last=False),
        lambda: Chunk(TokenRange(0, 4), TokenRange(6, 4), is_last=False),
        lambda: Chunk(TokenRange(-1, 12), TokenRange(0, 12)),
        lambda: Chunk(TokenRange(0, 1 << 31), TokenRange(0, 1 << 31)),
    ],
)
def test_chunks_lie_in_their_prompt(make):
    with pytest.raises(PlanError):
        make()


def test_packing_refuses_what_planning_refuses():
    plan, tokens = plan_of(), TokenRange(0, 12)
    for lists in (ids(3), ids(3, 3), ids(3, SLOTS)):
        with pytest.raises(PlanError):
            packing.scatter(plan, lists, tokens)
        with pytest.raises(PlanError):
            packing.gather(plan, ids(0, 1, 2), lists, tokens)


def test_every_group_needs_its_lists():
    plan = plan_of(hybrid())
    blocks = {0: np.arange(3, dtype=np.int32), 1: np.arange(3, dtype=np.int32), 2: np.zeros(1, np.int32)}
    other = {0: np.arange(2, dtype=np.int32), 1: np.arange(2, dtype=np.int32), 2: np.zeros(1, np.int32)}
    assert plan.instantiate(blocks, other, TokenRange(0, 12)).nbytes > 0
    for missing in range(3):
        for lists in (
            (blocks, {g: one for g, one in other.items() if g != missing}),
            ({g: one for g, one in blocks.items() if g != missing}, other),
        ):
            with pytest.raises(PlanError, match=f"layer group {missing}"):
                plan.instantiate(*lists, TokenRange(0, 12))


def test_long_lists_are_checked_as_short_ones():
    """Short lists are looked at one by one, long ones as arrays."""
    model, count = attention(), 100
    roles, slots = (InstanceRole.CONTEXT, InstanceRole.GENERATION), (2 * count,) * len(model.groups)
    a, b = (build_instance(model, deploy(model, block=4), slots, one, one.name).info for one in roles)
    plan, tokens = build_instance_plans(a, b)[0], TokenRange(0, 4 * count)
    plan.check_destination(ids(*range(count, 2 * count)), tokens)
    plan.check_destination(ids(*([-1] * 50), *range(50)), tokens)
    for wrong, problem in ((0, "names block 0 twice"), (2 * count, f"names block {2 * count}"), (-2, "names block -2")):
        with pytest.raises(PlanError, match=problem):
            plan.check_destination(ids(*range(count - 1), wrong), tokens)
