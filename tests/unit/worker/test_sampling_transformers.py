"""What remains after each filter is what the logits processors of transformers leave, on random logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import generation

from isthmus_worker.engine import Sampling
from isthmus_worker.sampling.adjust import adjust_
from sampling_cases import row_at, tokens, want
from sampling_oracle import draw, random_number

VOCAB, ROWS, SEEDS = 500, 20, 60


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(3)) * 3


def _ids(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length)


CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "temperature": ({"temperature": 0.6}, [generation.TemperatureLogitsWarper(0.6)]),
    "top_k": ({"top_k": 17}, [generation.TopKLogitsWarper(17)]),
    "top_p": ({"top_p": 0.85}, [generation.TopPLogitsWarper(0.85)]),
    "tiny top_p": ({"top_p": 0.01}, [generation.TopPLogitsWarper(0.01)]),
    "min_p": ({"min_p": 0.03}, [generation.MinPLogitsWarper(0.03)]),
    "together": (
        {"temperature": 1.4, "min_p": 0.01, "top_k": 40, "top_p": 0.9},
        [
            generation.TemperatureLogitsWarper(1.4),
            generation.MinPLogitsWarper(0.01),
            generation.TopKLogitsWarper(40),
            generation.TopPLogitsWarper(0.9),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_drawn_from_what_transformers_leaves(logits: torch.Tensor, name: str) -> None:
    settings, processors = CASES[name]
    scores = logits.double()
    for processor in processors:
        scores = processor(torch.zeros(ROWS, 0, dtype=torch.long), scores)
    probabilities = scores.softmax(-1).tolist()
    samplings = [Sampling(**{"max_tokens": 1, "temperature": 1.0, "seed": seed, **settings}) for seed in range(SEEDS)]
    found = tokens(logits, [row_at(4, *(want(one) for one in samplings)) for _ in range(ROWS)])
    numbers = [random_number(seed, 0, 4) for seed in range(SEEDS)]
    assert found == [[draw(row, number) for number in numbers] for row in probabilities]


@pytest.mark.parametrize("penalty", [0.7, 1.3, 5.0])
def test_repetition_penalty_is_that_of_transformers(logits: torch.Tensor, penalty: float) -> None:
    prompts, outputs = [_ids(row, 80) for row in range(ROWS)], [_ids(100 + row, 30) for row in range(ROWS)]
    ids = torch.as_tensor(np.stack([np.concatenate(pair) for pair in zip(prompts, outputs, strict=True)]))
    expected = generation.RepetitionPenaltyLogitsProcessor(penalty)(ids, logits)
    sampling = Sampling(1, repetition_penalty=penalty)
    draws = [
        want(sampling, 0, prompt.tolist(), output.tolist()) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    found = logits.clone()
    adjust_(found, draws)
    assert torch.equal(found, expected)
    rows = [row_at(111, one) for one in draws]
    assert tokens(logits, rows) == expected.argmax(-1)[:, None].tolist()


def test_minimum_length_and_bias_are_those_of_transformers(logits: torch.Tensor) -> None:
    stop = [3, 77, 401]
    expected = generation.MinNewTokensLengthLogitsProcessor(10, 5, stop)(
        torch.zeros(ROWS, 12, dtype=torch.long), logits
    )
    expected = generation.SequenceBiasLogitsProcessor([[[9], 2.5], [[10], -7.0]])(
        torch.zeros(ROWS, 12, dtype=torch.long), expected
    )
    found = logits.clone()
    sampling = Sampling(9, tuple(stop), 5, logit_bias=((9, 2.5), (10, -7.0)))
    adjust_(found, [want(sampling, output=(1, 2))] * ROWS)
    assert torch.equal(found, expected)
