"""The reference engine in real processes: split by a real hand-off it says what transformers says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from engine_pair import EnginePair
from engine_process import Settings, engines
from greedy_driver import open_oracle, oracle_greedy
from tiny_llama import tiny_llama

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed"),
]
LENGTHS = (1, 15, 16, 17, 32, 33, 150)
NEW_TOKENS = 12


def prompt_of(length: int) -> list[int]:
    return [3 + (length * 31 + index * 7) % 300 for index in range(length)]


def test_split_is_transformers(tmp_path: Path):
    folder = tiny_llama(tmp_path / "tiny")
    config: Settings = {
        "engine": {"kind": "torch", "num_threads": 1, "num_blocks": 128, "max_batch_tokens": 64},
        "model": {"path": str(folder), "name": "tiny"},
        "logging": {"level": "WARNING"},
    }
    model = open_oracle(folder)
    expected = {length: oracle_greedy(model, prompt_of(length), NEW_TOKENS) for length in LENGTHS}
    with engines() as make:
        pair = EnginePair(make, config)
        for length in LENGTHS:
            leg, offer = pair.prefill(prompt_of(length), NEW_TOKENS, length)
            assert leg.context_phase is not None
            notice = pair.hand_off(leg, offer)
            assert notice.stats.path.startswith("nixl/")
            split = [*leg.context_phase.first_tokens, *pair.generation.tokens(leg.key)]
            assert split == expected[length], f"prompt of {length} tokens"
        pair.stop()
