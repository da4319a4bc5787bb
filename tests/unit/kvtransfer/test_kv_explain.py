"""What people read about a plan: who sends what to whom, and why two instances can not work together."""

from __future__ import annotations

from kv_oracle.named import attention, deploy, mamba
from kv_oracle.tables import build_instance
from kvtransfer.explain import explain
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole

TOKENS = TokenRange(0, 24)


def pair(model, src, dst, other=None):
    other = other or model
    slots = [(32,) * len(one.groups) for one in (model, other)]
    context = build_instance(model, deploy(model, **src), slots[0], InstanceRole.CONTEXT, "context-0")
    generation = build_instance(other, deploy(other, **dst), slots[1], InstanceRole.GENERATION, "generation-0")
    return context.info, generation.info


def test_shared_heads_stages_and_a_conversion():
    text = explain(
        *pair(attention(heads=3), {"tp": 2, "layout": "hnd"}, {"pp": 2, "layout": "nhd", "block": 6}), TOKENS
    )
    assert text == (
        "context-0 (tp2) -> generation-0 (pp2)\n"
        "tokens [0, 24)\n"
        "  rank 0 -> rank 0: 576 bytes in 144 runs of 4 bytes on average\n"
        "    group 0 -> 0 {k, v} layers 0 heads [0, 1): hnd to nhd, blocks of 4 to 6\n"
        "    group 0 -> 0 {k, v} layers 1 heads [0, 2): hnd to nhd, blocks of 4 to 6\n"
        "  rank 0 -> rank 1: 576 bytes in 144 runs of 4 bytes on average\n"
        "    group 0 -> 0 {k, v} layers 2 heads [0, 1): hnd to nhd, blocks of 4 to 6\n"
        "    group 0 -> 0 {k, v} layers 3 heads [0, 2): hnd to nhd, blocks of 4 to 6\n"
        "  rank 1 -> rank 0: 576 bytes in 144 runs of 4 bytes on average\n"
        "    group 0 -> 0 {k, v} layers 0 heads [1, 3): hnd to nhd, blocks of 4 to 6\n"
        "    group 0 -> 0 {k, v} layers 1 heads [2, 3): hnd to nhd, blocks of 4 to 6\n"
        "  rank 1 -> rank 1: 576 bytes in 144 runs of 4 bytes on average\n"
        "    group 0 -> 0 {k, v} layers 2 heads [1, 3): hnd to nhd, blocks of 4 to 6\n"
        "    group 0 -> 0 {k, v} layers 3 heads [2, 3): hnd to nhd, blocks of 4 to 6\n"
        "\n"
        "writer of every layer and head (first view of each rank)\n"
        "  rank 0   head  0  1  2\n"
        "         layer  0  0  1  1\n"
        "         layer  1  0  0  1\n"
        "  rank 1   head  0  1  2\n"
        "         layer  2  0  1  1\n"
        "         layer  3  0  0  1"
    )


def test_sections_of_a_state_are_named():
    text = explain(*pair(mamba(layers=1), {"tp": 2}, {"tp": 4}), TOKENS)
    assert "rank 1 -> rank 3" in text
    assert "state {conv} layers 0 x [6, 8): sectioned" in text


def test_what_can_not_work_together_is_explained_by_every_reason():
    text = explain(*pair(attention(layers=3, bits=8), {"tp": 2}, {"tp": 2}, other=attention(layers=2)), TOKENS)
    head, *reasons = text.splitlines()[1:]
    assert head == "can not work together:"
    assert any("entries.size" in one and "16 bits" in one and "32 bits" not in one.split("yours")[0] for one in reasons)
    assert any("page_table.layers: mine 0-2, yours 0-1" in one for one in reasons)


def test_a_prompt_beyond_the_pool_is_still_explained():
    text = explain(*pair(attention(layers=1), {}, {}), TokenRange(0, 4000))
    assert "rank 0 -> rank 0" in text
