"""A step's draws row by row: bad rows, company, precision, log probabilities, and what a greedy step costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from isthmus_worker.engine import Sampling, TokenLogprobs
from isthmus_worker.runner import Draw
from isthmus_worker.sampling import sampler
from sampling_cases import drawn, one_token, row_at, tokens, want

GREEDY = Sampling(1)
DRAWN = Sampling(1, temperature=1.0, seed=4)
NAN, INF = float("nan"), float("inf")
KINDS: dict[str, Sampling] = {
    "greedy": GREEDY,
    "drawn": DRAWN,
    "top_p": Sampling(1, temperature=1.0, top_p=0.9),
    "top_k": Sampling(1, temperature=1.0, top_k=3),
    "penalty": Sampling(1, presence_penalty=1.0),
    "logprobs": Sampling(1, logprobs=2),
}


def _logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [NAN, INF, "all -inf"])
def test_a_bad_row_has_no_tokens_and_the_others_are_good(kind: str, bad: Any) -> None:
    logits = _logits(4)
    draw = want(KINDS[kind], output=(3, 4))
    rows = [row_at(8, draw), row_at(9, draw, draw), row_at(10, draw, want(GREEDY)), row_at(11, draw)]
    good = drawn(logits, rows)
    if bad == "all -inf":
        logits[1] = -INF
    else:
        logits[1, 7] = bad
    found = drawn(logits, rows)
    assert found == [good[0], (), *good[2:]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_fails_when_its_settings_leave_nothing(kind: str) -> None:
    """Every finite logit belongs to a stop token that may not come yet."""
    logits = torch.full((2, 50), -INF)
    logits[:, 5:7] = torch.tensor([1.0, 0.5])
    forbidden = replace(KINDS[kind], stop_token_ids=(5, 6), min_tokens=2)
    for other in (GREEDY, DRAWN):
        found = tokens(logits, [row_at(3, want(forbidden), want(other)), row_at(3, want(other))])
        assert [len(row) for row in found] == [0, 1]
        assert found[1][0] in (5, 6)
    allowed = tokens(logits, [row_at(3, want(forbidden, output=(1, 1)))] * 2)
    assert {token for row in allowed for token in row} <= {5, 6}
    assert [len(row) for row in allowed] == [1, 1]


@pytest.mark.parametrize("vocab", [50, 70000])
def test_a_draw_does_not_depend_on_its_company(vocab: int) -> None:
    logits = _logits(6, vocab)
    kinds = [one for one in KINDS.values() if one.temperature] + [Sampling(1, temperature=0.9, top_p=0.99, min_p=1e-6)]
    draws = [want(kind, sample, (1, 2), (2, 3)) for kind in kinds for sample in range(2)]
    together = drawn(logits, [row_at(20 + at, *draws) for at in range(6)])
    for at in range(6):
        for draw, expected in zip(draws, together[at], strict=True):
            assert one_token(logits[at], draw, 20 + at) == expected.token
    backwards = drawn(logits.flip(0), [row_at(20 + at, *reversed(draws)) for at in reversed(range(6))])
    assert [row[::-1] for row in backwards[::-1]] == together


def test_many_draws_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _logits(3)
    draws = [want(kind, sample, output=(9,)) for kind in KINDS.values() for sample in range(3)]
    rows = [row_at(at + 1, *draws) for at in range(3)]
    whole = drawn(logits, rows)
    for size in (1, 4 * 50, 7 * 50):
        monkeypatch.setattr(sampler, "_CPU_SLICE", size)
        assert drawn(logits, rows) == whole


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_drawn_in_single_precision(dtype: torch.dtype) -> None:
    logits = _logits(5).to(dtype)
    rows = [row_at(at + 1, *(want(kind, output=(9,)) for kind in KINDS.values())) for at in range(5)]
    assert drawn(logits, rows) == drawn(logits.float(), rows)


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = _logits(3)
    expected = logits.double().log_softmax(-1)
    settings = Sampling(1, temperature=0.7, seed=9, presence_penalty=2.0, logit_bias=((4, 9.0),), logprobs=6)
    rows = [
        row_at(at + 1, want(settings, output=(1, 2)), want(GREEDY), want(Sampling(1, logprobs=0))) for at in range(3)
    ]
    for at, (rich, plain, bare) in enumerate(drawn(logits, rows)):
        assert rich.logprobs is not None
        assert rich.logprobs.logprob == pytest.approx(float(expected[at, rich.token]), abs=1e-5)
        best = expected[at].topk(6)
        assert [token for token, _ in rich.logprobs.top] == best.indices.tolist()
        assert [value for _, value in rich.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert plain.logprobs is None
        assert bare.logprobs == TokenLogprobs(pytest.approx(float(expected[at].max()), abs=1e-5), ())


def test_equal_logits_are_listed_by_id_and_the_greedy_token_leads() -> None:
    logits = torch.tensor([[-3.0, 2.0, -0.0, 2.0, 0.0, 2.0, -3.0, 0.0]])
    ((found,),) = drawn(logits, [row_at(1, want(Sampling(1, logprobs=8)))])
    assert found.token == 1
    assert found.logprobs is not None
    assert [token for token, _ in found.logprobs.top] == [1, 3, 5, 2, 4, 7, 0, 6]


def test_logprobs_are_finite_and_no_more_than_there_are_tokens() -> None:
    logits = torch.tensor([[0.0, -INF, -1e30]])
    ((found,),) = drawn(logits, [row_at(1, want(Sampling(1, logprobs=20)))])
    assert found.logprobs == TokenLogprobs(0.0, ((0, 0.0), (2, -9999.0), (1, -9999.0)))


def test_answers_of_one_row_have_their_own_settings() -> None:
    logits = _logits(1)
    best = int(logits.argmax())
    draws = [want(GREEDY), want(Sampling(1, logit_bias=((33, 100.0),))), want(Sampling(1, temperature=1.0, top_k=1))]
    assert tokens(logits, [row_at(1, *draws)]) == [[best, 33, best]]


class _Passes(TorchDispatchMode):
    """How many operations read a tensor of at least `size` elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.count = size, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(isinstance(one, torch.Tensor) and one.numel() >= self.size for one in args)
        return func(*args, **(kwargs or {}))


def _passes(draw: Draw) -> int:
    logits = _logits(4)
    rows = [row_at(at + 1, draw, draw) for at in range(4)]
    with _Passes(logits.numel()) as mode:
        sampler.draw_tokens(logits, rows)
    return mode.count


def test_greedy_steps_read_the_logits_once() -> None:
    assert _passes(want(Sampling(9, stop_token_ids=(3,), min_tokens=2, seed=8, top_k=3, top_p=0.5), output=(1, 2))) == 1
    assert _passes(want(Sampling(9, stop_token_ids=(3,), min_tokens=2), output=(1,))) > 1


def test_prompt_and_output_far_apart_count_as_said() -> None:
    """Presence and frequency look at the output, repetition at both."""
    logits = np.zeros((1, 8), np.float32)
    logits[0, :4] = (3.0, 2.9, 2.8, 2.7)
    output = {"prompt": (0, 1), "output": (2,)}
    said = {
        "presence": Sampling(1, presence_penalty=0.5),
        "repetition": Sampling(1, repetition_penalty=2.0),
    }
    found = {name: one_token(logits[0], want(one, 0, **output)) for name, one in said.items()}
    assert found == {"presence": 0, "repetition": 3}
