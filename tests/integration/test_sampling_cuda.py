"""On a GPU the same tokens are drawn as on the CPU. One command: pytest tests/integration/test_sampling_cuda.py"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from isthmus_worker.engine import Sampling
from isthmus_worker.sampling.sampler import draw_tokens
from sampling_cases import row_at, want

pytestmark = [
    pytest.mark.integration,
    pytest.mark.gpu,
]

ROWS, VOCAB = 8, 128256
PLAIN = Sampling(9, temperature=1.0)
SETTINGS = [
    Sampling(9),
    PLAIN,
    replace(PLAIN, min_p=0.02),
    replace(PLAIN, top_k=50),
    replace(PLAIN, top_p=0.9),
    replace(PLAIN, temperature=2.0, top_p=0.95),
    replace(PLAIN, top_k=6000, top_p=0.97, min_p=1e-6),
    replace(
        PLAIN, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias=((5, 9.0), (6, -9.0))
    ),
    Sampling(9, (7, 8), 6, repetition_penalty=1.2, logprobs=5),
    replace(PLAIN, top_p=0.8, logprobs=0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tokens_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    logits = (torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1)) * 2.5).to(dtype)
    logits[3, 77] = float("nan")
    logits[5, 78] = float("inf")
    draws = [
        want(replace(one, seed=seed), seed, prompt=range(40, 90), output=(5, 5, 60, 61))
        for seed, one in enumerate(SETTINGS)
    ]
    rows = [row_at(at + 1, *draws) for at in range(ROWS)]
    with torch.inference_mode():
        expected, found = draw_tokens(logits, rows), draw_tokens(logits.cuda(), rows)
    assert [len(row) for row in found] == [0 if at in (3, 5) else len(draws) for at in range(ROWS)]
    # exp differs in its last bit between the two: one boundary in 10^13 may, too.
    assert [[one.token for one in row] for row in found] == [[one.token for one in row] for row in expected]
    for ours, theirs in zip(sum(found, ()), sum(expected, ()), strict=True):
        assert (ours.logprobs is None) == (theirs.logprobs is None)
        if ours.logprobs is not None and theirs.logprobs is not None:
            assert ours.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
            assert [token for token, _ in ours.logprobs.top] == [token for token, _ in theirs.logprobs.top]
