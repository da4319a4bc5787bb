"""One prompt and three answers to it, over a context and a generation scheduler."""

from __future__ import annotations

from typing import Any

from isthmus_core.keys import RequestKey
from isthmus_worker.engine import Sampling
from mock_oracle import oracle
from sched_pair import Pair

PROMPT = [32 + index * 7 % 95 for index in range(37)]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5, "n": 3}


def first_sampled() -> list[int]:
    """First tokens of the three answers."""
    return [oracle(PROMPT, 1, sampling=Sampling(9, **HOT), sample=sample)[0] for sample in range(3)]


def check_text(pair: Pair, key: RequestKey, stop: tuple[int, ...] = ()) -> None:
    """All three answers of 9 tokens are those of one instance, up to the first token of `stop`."""
    for sample in range(3):
        expected = oracle(PROMPT, 9, sampling=Sampling(9, **HOT), sample=sample)
        ends = [index for index, token in enumerate(expected) if token in stop]
        assert pair.text(key, sample) == (expected[: ends[0] + 1] if ends else expected), sample
