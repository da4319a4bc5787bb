"""Pairs of deployments that people run, each with several prompts, against the oracle."""

from __future__ import annotations

import pytest

from kv_oracle.check import check_case
from kv_oracle.named import apart, attention, deploy, few_units, hybrid, mamba, prompt_of
from kv_oracle.request import Case

NAMED = {
    "TP2 -> PP2": (attention(), {"tp": 2}, {"pp": 2}),
    "TP4 -> PP2": (attention(), {"tp": 4}, {"pp": 2}),
    "PP2 -> TP4": (attention(), {"pp": 2}, {"tp": 4}),
    "PP uneven -> PP uneven": (attention(layers=7), {"pp": (1, 4, 2)}, {"pp": (5, 2)}),
    "TP4 -> TP1, 8 heads": (attention(heads=8), {"tp": 4}, {}),
    "TP1 -> TP4, 8 heads": (attention(heads=8), {}, {"tp": 4}),
    "TP8, 4 heads -> TP2": (attention(heads=4), {"tp": 8}, {"tp": 2}),
    "TP2 -> TP8, 4 heads": (attention(heads=4), {"tp": 2}, {"tp": 8}),
    "TP3 -> TP2, 3 heads": (attention(heads=3), {"tp": 3}, {"tp": 2}),
    "TP6 -> TP4": (attention(heads=12), {"tp": 6}, {"tp": 4}),
    "TP9 -> TP2": (attention(heads=9), {"tp": 9}, {"tp": 2}),
    "TP2 -> TP9, balanced": (attention(heads=9), {"tp": 2, "heads": "balanced"}, {"tp": 9, "heads": "balanced"}),
    "DP2 x TP2 -> DP4": (attention(), {"tp": 2, "dp": 2, "dp_rank": 1}, {"dp": 4, "dp_rank": 2}),
    "CP2 zigzag -> CP2 interleaved": (
        attention(),
        {"cp": 2, "sharding": ("zigzag", 3)},
        {"cp": 2, "sharding": ("interleaved", 2)},
    ),
    "CP2 contiguous -> TP2": (attention(), {"cp": 2, "sharding": ("contiguous", 1)}, {"tp": 2}),
    "one pool, blocks of 4 -> a pool per layer, K and V apart": (
        apart(),
        {"pools": "slot_major", "layout": "hnd"},
        {"pools": "layer_pools", "cuts": "pool"},
    ),
    "one pool -> one pool per layer, K and V together": (
        attention(),
        {"pools": "slot_major"},
        {"pools": "layer_pools", "cuts": "pool"},
    ),
    "MLA TP4 -> DP4": (attention(heads=0), {"tp": 4}, {"dp": 4, "dp_rank": 3}),
    "Mamba TP2 -> TP4": (mamba(), {"tp": 2}, {"tp": 4}),
    "Mamba TP4 -> TP2, rows": (mamba(rows=3), {"tp": 4}, {"tp": 2}),
    "Mamba TP2 -> TP1, B and C divided": (mamba(divided=True), {"tp": 2}, {}),
    "more ranks than units TP4 -> TP3": (
        few_units(),
        {"tp": 4, "heads": "balanced"},
        {"tp": 3, "heads": "balanced"},
    ),
    "hybrid TP2 x PP2 -> TP4": (hybrid(), {"tp": 2, "pp": (4, 5)}, {"tp": 4}),
}

PROMPTS = {
    "one chunk": {},
    "reused on both sides": {"reused_src": 5, "begin_dst": 7},
    "chunks off both grids": {"borders": (7, 17), "begin_dst": 3},
}


def build(name: str, prompt: str, *, layout: str, block: int) -> Case:
    model, src, dst = NAMED[name]
    return prompt_of(
        model, deploy(model, **src), deploy(model, **{"layout": layout, "block": block, **dst}), **PROMPTS[prompt]
    )


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(("layout", "block"), [("nhd", 4), ("hnd", 6)])
def test_named_pairs(name, prompt, layout, block):
    check_case(build(name, prompt, layout=layout, block=block), other_forms=True, digests=True)


@pytest.mark.parametrize("name", ["MLA TP4 -> DP4", "TP8, 4 heads -> TP2", "Mamba TP2 -> TP4"])
def test_the_election_of_older_peers(name):
    check_case(build(name, "one chunk", layout="nhd", block=4), seed_compat=True)
