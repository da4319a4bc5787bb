"""What `explain` tells about small plans: golden text, and numbers that the oracle confirms."""

from __future__ import annotations

import re

import pytest

from kv_oracle.election import Election
from kv_oracle.model import Attention
from kv_oracle.named import attention, deploy, mamba, prompt_of
from kv_oracle.tables import build_instance
from kv_oracle.world import build_world
from kvtransfer.explain import explain
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceInfo, InstanceRole

THREE_HEADS = """\
context-0 (tp2) -> generation-0 (one rank)
tokens [0, 10)
  rank 0 -> rank 0: 288 bytes in 48 runs of 6 bytes on average
    group 0 -> 0 {k, v} layers 0 heads [0, 1): nhd, blocks of 4 to 6
    group 0 -> 0 {k, v} layers 1 heads [0, 2): nhd, blocks of 4 to 6
  rank 1 -> rank 0: 288 bytes in 48 runs of 6 bytes on average
    group 0 -> 0 {k, v} layers 0 heads [1, 3): nhd, blocks of 4 to 6
    group 0 -> 0 {k, v} layers 1 heads [2, 3): nhd, blocks of 4 to 6

writer of every layer and head (first view of each rank)
  rank 0   head  0  1  2
         layer  0  0  1  1
         layer  1  0  0  1"""

STATE = """\
context-0 (one rank) -> generation-0 (tp2)
tokens [0, 10)
  rank 0 -> rank 0: 52 bytes in 2 runs of 26 bytes on average
    group 0 -> 0 state {conv} layers 0 x [0, 4): sectioned
    group 0 -> 0 state {conv} layers 0 B [0, 2): sectioned
    group 0 -> 0 state {conv} layers 0 C [0, 2): sectioned
    group 0 -> 0 state {state} layers 0 h [0, 4): sectioned
  rank 0 -> rank 1: 52 bytes in 2 runs of 26 bytes on average
    group 0 -> 0 state {conv} layers 0 x [4, 8): sectioned
    group 0 -> 0 state {conv} layers 0 B [0, 2): sectioned
    group 0 -> 0 state {conv} layers 0 C [0, 2): sectioned
    group 0 -> 0 state {state} layers 0 h [4, 8): sectioned
"""


def side(model, role: InstanceRole, name: str, **options) -> InstanceInfo:
    return build_instance(model, deploy(model, **options), (4,), role, name).info


def told(model, src: dict, dst: dict) -> str:
    context = side(model, InstanceRole.CONTEXT, "context-0", **src)
    return explain(context, side(model, InstanceRole.GENERATION, "generation-0", **dst), TokenRange(0, 10))


def test_two_ranks_that_share_a_head_write_to_one():
    assert told(attention(layers=2, heads=3), {"tp": 2}, {"block": 6}) == THREE_HEADS


def test_a_recurrent_state_is_told_section_by_section():
    assert told(mamba(layers=1), {}, {"tp": 2}).startswith(STATE)


def test_the_drawing_names_the_writers_that_the_rule_names():
    model = attention(layers=2, heads=3)
    case = prompt_of(model, deploy(model, tp=2), deploy(model, block=6), 10)
    world = build_world(case)
    elect = Election(case, world.src, world.dst)
    rows = re.findall(r"layer +(\d+) +(\d+) +(\d+) +(\d+)$", THREE_HEADS, re.MULTILINE)
    drawn = {int(layer): [int(rank) for rank in ranks] for layer, *ranks in rows}
    (group,) = model.groups
    assert isinstance(group, Attention)
    rule = {layer: [elect.of_head(0, group.parts[0], layer, head, 0) for head in range(3)] for layer in range(2)}
    assert drawn == rule


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
def test_bytes_add_up_to_what_the_destination_holds(layout):
    model = attention(layers=2, heads=4)
    text = told(model, {"tp": 4, "block": 5}, {"tp": 2, "block": 5, "layout": layout})
    sizes = [int(size.replace(",", "")) for size in re.findall(r": ([\d,]+) bytes in", text)]
    assert sum(sizes) == 10 * 4 * 4 * 2 * 2  # tokens, heads, bytes of a head, K and V, layers
