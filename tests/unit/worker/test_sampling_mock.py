"""Sampling settings on the mock: several answers, seeds, bans and log probabilities, as its definition says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from isthmus_core.config import MockConfig
from isthmus_worker.engine import Sampling
from isthmus_worker.mock_engine import MockRunner
from isthmus_worker.runner import BatchRow, Draw, Drawn
from mock_oracle import oracle
from sched_bench import memory_of

PROMPT = [32 + index * 7 % 95 for index in range(21)]
SIZE = 4


def runner(blocks: int = 32) -> tuple[MockRunner, np.ndarray]:
    made = MockRunner(MockConfig(max_model_len=512), "mock", SIZE)
    return made, memory_of(made.allocate_cache(blocks))


def row(tokens, start: int, blocks, *draws: Draw) -> BatchRow:
    return BatchRow(np.array(tokens, np.int64), start, (np.array(blocks, np.int32),), draws)


def draw(sampling: Sampling, sample: int = 0, output=()) -> Draw:
    return Draw(sampling, sample, np.array(PROMPT, np.int64), np.array(output, np.int64))


def answers(made: MockRunner, sampling: Sampling, length: int) -> list[list[int]]:
    """`sampling.n` answers to PROMPT as an engine makes them: one prefill, then copies of its last block."""
    full, used = divmod(len(PROMPT), SIZE)
    assert used
    shared = list(range(full + 1))
    (first,) = made.execute([row(PROMPT, 0, shared, *(draw(sampling, sample) for sample in range(sampling.n)))])
    places = [[*shared, 10, 11]]
    places += [[*shared[:-1], *range(start, start + 3)] for start in range(20, 20 + 3 * (sampling.n - 1), 3)]
    made.copy_blocks(np.full(sampling.n - 1, full, np.int32), np.array([place[full] for place in places[1:]], np.int32))
    outputs = [[drawn.token] for drawn in first]
    while len(outputs[0]) < length:
        start = len(PROMPT) + len(outputs[0]) - 1
        rows = [
            row(output[-1:], start, place, draw(sampling, sample, output))
            for sample, (output, place) in enumerate(zip(outputs, places, strict=True))
        ]
        for output, (drawn,) in zip(outputs, made.execute(rows), strict=True):
            output.append(drawn.token)
    return outputs


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_several_answers_are_the_oracles(temperature: float):
    sampling = Sampling(8, temperature=temperature, seed=(1 << 64) - 3, n=4)
    found = answers(runner()[0], sampling, 8)
    assert found == [oracle(PROMPT, 8, sampling=sampling, sample=sample) for sample in range(4)]
    assert len({tuple(one) for one in found}) == (4 if temperature else 1)


def test_the_seed_decides_and_repeats():
    texts = [answers(runner()[0], Sampling(8, temperature=1.0, seed=seed), 8)[0] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    assert texts[0] != oracle(PROMPT, 8)


def test_a_sampled_text_still_depends_on_every_page():
    for block in range(5):
        made, memory = runner()
        made.execute([row(PROMPT[:20], 0, range(5))])
        memory[block, 7] ^= 1
        drawn: list[int] = []
        for step in range(4):
            tokens = PROMPT[20:] if not step else drawn[-1:]
            sampling = Sampling(4, temperature=1.0)
            drawn.append(made.execute([row(tokens, 20 + step, range(7), draw(sampling))])[0][0].token)
        assert drawn != oracle(PROMPT, 4, sampling=Sampling(4, temperature=1.0)), block


def test_copied_blocks_are_whole_and_independent():
    made, memory = runner()
    made.execute([row(PROMPT, 0, range(6))])
    made.copy_blocks(np.array([5, 2], np.int32), np.array([9, 8], np.int32))
    assert (memory[9] == memory[5]).all()
    assert (memory[8] == memory[2]).all()
    before = memory[5].copy()
    made.execute([row([65], 21, [0, 1, 2, 3, 4, 9])])
    assert (memory[5] == before).all()
    assert (memory[9] != memory[5]).any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_banned_character_gives_way_to_the_next_one(temperature: float):
    plain = Sampling(1, temperature=temperature)
    first = oracle(PROMPT, 1, sampling=plain)[0]
    after = [32 + (first - 32 + step) % 95 for step in range(1, 3)]
    (drawn,) = runner()[0].execute(
        [
            row(
                PROMPT,
                0,
                range(6),
                draw(Sampling(1, temperature=temperature, logit_bias=((first, -100.0),))),
                draw(Sampling(1, temperature=temperature, logit_bias=((first, -100.0), (after[0], -100.0)))),
                draw(Sampling(1, temperature=temperature, logit_bias=((first, -99.0),))),
                draw(Sampling(1, temperature=temperature, logit_bias=tuple((c, -100.0) for c in range(32, 127)))),
            )
        ]
    )
    assert [one.token for one in drawn] == [*after, first, first]


def test_stop_tokens_wait_for_the_shortest_answer():
    stop = oracle(PROMPT, 1)[0]
    sampling = Sampling(8, stop_token_ids=(stop,), min_tokens=3)
    (drawn,) = runner()[0].execute(
        [row(PROMPT, 0, range(6), *(draw(sampling, output=[65] * made) for made in (0, 2, 3)))]
    )
    assert [one.token == stop for one in drawn] == [False, False, True]


def test_log_probabilities_are_a_distribution():
    greedy, sampled = Sampling(1, logprobs=3), Sampling(1, temperature=1.0, seed=5, logprobs=20)
    (drawn,) = runner()[0].execute([row(PROMPT, 0, range(6), draw(greedy), draw(sampled), draw(Sampling(1)))])
    best, other, none = drawn
    assert none == Drawn(best.token, None)
    assert best.logprobs is not None
    assert other.logprobs is not None
    assert best.logprobs.top == other.logprobs.top[:3]
    assert best.logprobs.top[0] == (best.token, best.logprobs.logprob)
    assert len(other.logprobs.top) == 20
    draws = (draw(Sampling(1, temperature=1.0, seed=seed, logprobs=0)) for seed in range(1500))
    (drawn,) = runner()[0].execute([row(PROMPT, 0, range(6), *draws)])
    assert all(one.logprobs.top == () for one in drawn)
    seen = {one.token: one.logprobs.logprob for one in drawn}
    assert len(seen) == 95
    assert math.fsum(math.exp(value) for value in seen.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(seen[token] == value for token, value in other.logprobs.top)
