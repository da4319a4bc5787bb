"""Draft tokens: guessed on the context side, checked on the generation side; the text is the same without them."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_core.generation import Sampling, Tokens, chunk_from_pb, chunk_to_pb
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase
from isthmus_worker.runner import Drawn
from isthmus_worker.scheduler import RequestFinished
from isthmus_worker.scheduler.drafts import kept, look_up
from isthmus_worker.scheduler.events import ContextDone
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache, new_key
from sched_pair import Pair

PROMPT = [65 + at % 9 for at in range(30)]


@pytest.mark.parametrize(
    ("tokens", "count", "found"),
    [
        ([1, 2, 3, 9, 8, 7, 1, 2, 3], 4, (9, 8, 7, 1)),
        ([1, 2, 3, 9, 5, 2, 3, 4, 1, 2, 3], 2, (9, 5)),
        ([5, 2, 3, 4, 9, 2, 3], 8, (4, 9, 2, 3)),
        ([7, 7, 7, 7], 3, (7,)),
        ([1, 2, 3, 4], 3, ()),
        ([4], 3, ()),
    ],
)
def test_guesses_follow_the_last_place_of_the_longest_ending(tokens: list[int], count: int, found: tuple[int, ...]):
    assert look_up(np.array(tokens, np.int64), count) == found


@pytest.mark.parametrize(("drafts", "count"), [((5, 6, 7), 4), ((5, 6, 8), 3), ((1, 6, 7), 1), ((), 1)])
def test_draws_count_up_to_the_first_one_that_was_not_foreseen(drafts: tuple[int, ...], count: int):
    assert kept([Drawn(token) for token in (5, 6, 7, 9)[: len(drafts) + 1]], drafts) == count


def test_drafts_go_over_every_wire():
    chunk = Tokens((5,), drafts=(6, 7))
    assert chunk_from_pb(chunk_to_pb(chunk)) == chunk


@pytest.fixture(name="right", params=[0, 1, 3, 5])
def _right(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(name="sampling", params=["greedy", "seeded", "with_logprobs"])
def _sampling(request: pytest.FixtureRequest) -> Sampling:
    hot = {"temperature": 1.0, "seed": 7}
    kinds = {"greedy": {}, "seeded": hot, "with_logprobs": {**hot, "logprobs": 2, "min_tokens": 9}}
    return Sampling(12, **kinds[request.param])


@pytest.fixture(name="text")
def _text(monkeypatch: pytest.MonkeyPatch, right: int, sampling: Sampling) -> list[int]:
    """What is to be said; of five guesses the first `right` ones are so."""
    text = oracle(PROMPT, 12, sampling=sampling)
    guesses = (*text[1 : 1 + right], *(32 + (token - 31) % 95 for token in text[1 + right : 6]))
    monkeypatch.setattr("isthmus_worker.scheduler.scheduler.look_up", lambda tokens, count: guesses[:count])
    return text


def report_of(bench: Bench, key: RequestKey) -> tuple[int, int]:
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    return end.report.draft_tokens, end.report.accepted_draft_tokens


def test_generation_first_says_the_same_whatever_was_guessed(text: list[int], right: int, sampling: Sampling):
    pair = Pair(draft_tokens=5)
    key = pair.submit_as(PROMPT, sampling)
    pair.run()
    assert pair.text(key) == text
    assert report_of(pair.generation, key) == (5, right)
    pair.check_idle()


def test_context_first_says_the_same_whatever_was_guessed(text: list[int], right: int, sampling: Sampling):
    context, generation = Bench("context", draft_tokens=5), Bench("generation")
    key = context.submit_as(PROMPT, sampling, key=new_key())
    context.run()
    (done,) = context.messages(ContextDone)
    phase = ContextPhase(key, done.first_tokens, len(PROMPT), HOLDER)
    generation.submit_as(PROMPT, sampling, key=key, phase=phase)
    generation.step()
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    generation.run()
    assert [text[0], *generation.trails[key].tokens] == text
    assert report_of(generation, key) == (5, right)
    assert generation.rows.count(0) < 12
    generation.check_idle()


def test_a_stop_token_among_the_right_guesses_ends_the_answer(monkeypatch: pytest.MonkeyPatch):
    text = oracle(PROMPT, 12)
    stop = text[2]
    assert stop not in text[:2]
    monkeypatch.setattr("isthmus_worker.scheduler.scheduler.look_up", lambda tokens, count: tuple(text[1:6]))
    pair = Pair(draft_tokens=5)
    key = pair.submit(PROMPT, 12, stop=[stop], min_tokens=2)
    pair.run()
    assert pair.text(key) == text[: text.index(stop) + 1]
    pair.check_idle()


def test_guesses_take_nobodys_blocks(monkeypatch: pytest.MonkeyPatch):
    """With one block left and two answers that begin, one of them does without its guesses; nobody is preempted."""
    text = oracle(PROMPT[:15], 5)
    monkeypatch.setattr("isthmus_worker.scheduler.scheduler.look_up", lambda tokens, count: tuple(text[1:6]))
    monkeypatch.delattr("isthmus_worker.scheduler.places.Places.requeue")
    pair = Pair(draft_tokens=5, num_blocks=9, prefix_caching=False)
    keys = [pair.submit(PROMPT[:15], 5) for _ in range(2)]
    pair.run()
    assert [pair.text(key) for key in keys] == [text, text]
    assert sorted(report_of(pair.generation, key) for key in keys) == [(0, 0), (3, 3)]
    pair.check_idle()
