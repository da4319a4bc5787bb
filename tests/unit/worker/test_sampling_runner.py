"""Sampling through the torch runner: answers that fork, seeds, chunks and company."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greedy_driver import blocks_for, open_oracle
from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw, Drawn, NonFiniteLogits
from isthmus_worker.torch_engine import TorchRunner
from sampling_oracle import chi_square, chi_square_limit, distribution
from sched_bench import memory_of
from tiny_models import tiny_llama

BLOCK = 16
PROMPT = np.random.default_rng(2).integers(4, 320, 37)
LENGTH = 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def _runner(folder: Path) -> TorchRunner:
    runner = TorchRunner(folder)
    runner.allocate_cache(64)
    runner.warm_up()
    return runner


def _row(ids: np.ndarray, start: int, blocks: list[int], *draws: Draw) -> BatchRow:
    return BatchRow(np.array(ids, np.int64), start, (np.array(blocks, np.int32),), draws)


def _draw(sampling: Sampling, sample: int, output: list[int]) -> Draw:
    return Draw(sampling, sample, PROMPT, np.array(output, np.int64))


def _answers(runner: TorchRunner, sampling: Sampling, samples: list[int], chunk: int = 1 << 20) -> list[list[Drawn]]:
    """Answers of one request: one prefill, then every answer on a copy of the last block."""
    count, full = len(PROMPT), len(PROMPT) // BLOCK
    needed = blocks_for(count + LENGTH)
    for begin in range(0, count, chunk):
        end = min(begin + chunk, count)
        draws = [_draw(sampling, sample, []) for sample in samples] if end == count else []
        (first,) = runner.execute([_row(PROMPT[begin:end], begin, list(range(full + 1)), *draws)])
    places = [[*range(full), *range(10 + at * needed, 10 + at * needed + needed - full)] for at in range(len(samples))]
    runner.copy_blocks(np.full(len(samples), full, np.int32), np.array([place[full] for place in places], np.int32))
    outputs = [[one] for one in first]
    while len(outputs[0]) < LENGTH:
        rows: list[BatchRow] = []
        for sample, output, place in zip(samples, outputs, places, strict=True):
            said = [one.token for one in output]
            rows.append(_row(said[-1:], count + len(said) - 1, place, _draw(sampling, sample, said)))
        for output, (one,) in zip(outputs, runner.execute(rows), strict=True):
            output.append(one)
    return outputs


def _texts(answers: list[list[Drawn]]) -> list[list[int]]:
    return [[one.token for one in answer] for answer in answers]


SETTINGS = {
    "plain": Sampling(LENGTH, temperature=1.0, seed=12),
    "all": Sampling(LENGTH, (2, 9), 5, 1.2, 0.95, 50, 0.01, 12, 0.5, 0.4, 1.2, ((40, 2.0), (41, -100.0)), logprobs=3),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_answers_are_the_same_together_alone_and_in_chunks(folder: Path, name: str) -> None:
    sampling = SETTINGS[name]
    together = _answers(_runner(folder), sampling, [0, 1, 2])
    assert len({tuple(text) for text in _texts(together)}) == 3
    alone = [_answers(_runner(folder), sampling, [sample])[0] for sample in (0, 1, 2)]
    assert _texts(alone) == _texts(together)
    assert _texts(_answers(_runner(folder), sampling, [2, 0], chunk=5)) == [_texts(together)[at] for at in (2, 0)]


def test_greedy_answers_of_one_prompt_are_equal(folder: Path) -> None:
    first, second = _texts(_answers(_runner(folder), Sampling(LENGTH), [0, 1]))
    assert first == second


def test_another_seed_is_another_text(folder: Path) -> None:
    texts = [_texts(_answers(_runner(folder), Sampling(LENGTH, temperature=1.0, seed=seed), [0]))[0] for seed in (1, 2)]
    assert texts[0] != texts[1]


def test_frequencies_and_logprobs_are_those_of_transformers_logits(folder: Path) -> None:
    import torch

    with torch.inference_mode():
        logits = open_oracle(folder)(torch.tensor([PROMPT.tolist()])).logits[0, -1]
    sampling = Sampling(1, temperature=0.8, top_k=20, logprobs=5)
    draws = [_draw(sampling, sample, []) for sample in range(3000)]
    (found,) = _runner(folder).execute([_row(PROMPT, 0, [3, 1, 2], *draws)])
    observed = np.bincount([one.token for one in found], minlength=320).tolist()
    expected = distribution(logits.tolist(), sampling)
    assert chi_square(observed, expected) < chi_square_limit(20)
    logs = logits.double().log_softmax(-1)
    for one in found[:50]:
        assert one.logprobs is not None
        assert one.logprobs.logprob == pytest.approx(float(logs[one.token]), abs=1e-3)
        assert [token for token, _ in one.logprobs.top] == logs.topk(5).indices.tolist()


def test_a_bad_row_with_several_draws_fails_alone(folder: Path) -> None:
    runner = TorchRunner(folder)
    memory = memory_of(runner.allocate_cache(16))
    draws = [_draw(Sampling(4, temperature=1.0, logprobs=1), sample, []) for sample in range(2)]
    (good,) = runner.execute([_row(PROMPT, 0, [0, 1, 2], *draws)])
    runner.copy_blocks(np.array([0, 1, 2], np.int32), np.array([6, 7, 8], np.int32))
    memory[7] = 0xFF  # NaN in every float format
    rows = [
        _row(PROMPT[36:], 36, [0, 1, 2], *draws),
        _row(PROMPT[36:], 36, [6, 7, 8], *draws),
        _row(PROMPT[:10], 0, [9]),
    ]
    with pytest.raises(NonFiniteLogits) as raised:
        runner.execute(rows)
    assert raised.value.rows == [1]
    assert [len(row) for row in raised.value.drawn] == [2, 0, 0]
    assert _texts([list(raised.value.drawn[0])]) == _texts([list(good)])


def test_copied_blocks_are_whole(folder: Path) -> None:
    runner = _runner(folder)
    runner.execute([_row(PROMPT, 0, [4, 2, 9])])
    runner.copy_blocks(np.array([9, 4], np.int32), np.array([1, 0], np.int32))
    (before,) = runner.execute([_row(PROMPT[36:], 36, [4, 2, 9], _draw(Sampling(1), 0, []))])
    (after,) = runner.execute([_row(PROMPT[36:], 36, [0, 2, 1], _draw(Sampling(1), 0, []))])
    assert before == after


def test_a_copy_is_cleaned_behind_its_tokens(folder: Path) -> None:
    """Block 9 had 5 tokens of another request; it becomes a copy of one that a peer has written, 5 tokens as well."""
    runner = TorchRunner(folder)
    memory = memory_of(runner.allocate_cache(16)).view(np.float32).reshape(16, 2, 2, 2, BLOCK, 16)
    last, draw = PROMPT[5:6], _draw(Sampling(1), 0, [])
    runner.execute([_row(PROMPT[:5], 0, [3]), _row(PROMPT[10:15], 0, [9])])
    (expected,) = runner.execute([_row(last, 5, [3], draw)])
    memory[3, :, :, :, 5:] = np.nan
    runner.copy_blocks(np.array([3], np.int32), np.array([9], np.int32))
    # A longer row beside it makes the short one read its whole block.
    beside = _row(last, 40, [1, 2, 4], draw)
    assert runner.execute([beside, _row(last, 5, [9], draw)])[1] == expected
