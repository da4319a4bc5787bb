"""The reference engine in real processes: split by a real hand-off it says what transformers says."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine_pair import EnginePair, first_of
from engine_process import Settings, engines
from greedy_driver import open_oracle, oracle_greedy
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, RequestType, Sampling
from tiny_models import tiny_llama, tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed"),
]
LENGTHS = (1, 15, 16, 17, 32, 33, 150)
NEW_TOKENS = 12


def prompt_of(length: int) -> list[int]:
    return [3 + (length * 31 + index * 7) % 300 for index in range(length)]


@pytest.mark.parametrize(
    ("architecture", "variant"),
    [
        ("Llama", {}),
        ("Mistral", {"sliding_window": 24}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "num_hidden_layers": 4, "max_window_layers": 2}),
        ("Qwen3", {"head_dim": 32}),
    ],
)
def test_split_is_transformers(tmp_path: Path, architecture: str, variant: dict[str, Any]):
    """A layer with a window gets the tokens that it still sees, the others all."""
    folder = tiny_model(tmp_path / "tiny", architecture, **variant)
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
            notice = pair.hand_off(leg, offer)
            assert notice.stats.path.startswith("nixl/")
            split = [*first_of(leg), *pair.generation.tokens(leg.key)]
            assert split == expected[length], f"prompt of {length} tokens"
        pair.stop()


def test_answers_drawn_split_and_from_reused_blocks_are_those_of_one_plain_instance(tmp_path: Path):
    """Three answers: the plain instance computes everything, each time. The others fork, hand off and reuse."""
    folder = tiny_llama(tmp_path / "tiny")
    engine = {"kind": "torch", "num_threads": 1, "num_blocks": 128, "max_batch_tokens": 64}
    config: Settings = {
        "engine": engine,
        "model": {"path": str(folder), "name": "tiny"},
        "logging": {"level": "WARNING"},
    }
    plain: Settings = {**config, "engine": {**engine, "prefix_caching": False}}
    hot = {"temperature": 1.0, "seed": 11, "n": 3, "logprobs": 1}
    with engines() as make:
        alone, pair = make(plain), EnginePair(make, config)
        alone.ready()
        for length in (16, 40):
            prompt = prompt_of(length)
            key = RequestKey((1 << 41) + length)
            sampling = Sampling(NEW_TOKENS, **hot)
            alone.run(EngineRequest(key, RequestType.CONTEXT_AND_GENERATION, tuple(prompt), sampling))
            expected = [[token for chunk in alone.chunks(key, sample) for token in chunk.ids] for sample in range(3)]
            assert len(set(map(tuple, expected))) == 3
            for again in range(2):
                leg, offer = pair.prefill(prompt, NEW_TOKENS, 2 * length + again, **hot)
                pair.hand_off(leg, offer)
                assert leg.context_phase is not None
                for sample, first in enumerate(leg.context_phase.first_tokens):
                    chunks = pair.generation.chunks(leg.key, sample)
                    assert all(len(chunk.logprobs) == len(chunk.ids) for chunk in (first, *chunks))
                    rest = [token for chunk in chunks for token in chunk.ids]
                    assert [*first.ids, *rest] == expected[sample], (length, again, sample)
                assert pair.context.finished(leg.key).report.cached_tokens == again * ((length - 1) // 16 * 16)
        pair.stop()
