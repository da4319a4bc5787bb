"""Random lives of requests whose legs start at once: drops, failures and tight memory, in any order."""

from __future__ import annotations

import random

import pytest

from isthmus_core.errors import Overloaded
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import Sampling
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.config import OnFailure
from kvtransfer.ports import TransferFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from mock_oracle import oracle
from sched_pair import Pair

POLICIES = [HandoffPolicy(retries=1, on_failure=one) for one in OnFailure]


class Life:
    """One pair and what a client would have asked for."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pair = Pair(
            policy=self.draw.choice(POLICIES),
            num_blocks=self.draw.choice([20, 40]),
            max_batch_tokens=self.draw.choice([5, 10, 16]),
            reserve_early=seed % 2 == 1,
            may_take_over=seed % 3 != 0,
        )
        self.asked: dict[RequestKey, tuple[list[int], Sampling]] = {}
        self.unsettled: set[RequestKey] = set()

    def submit(self) -> None:
        """One more request, if there is room in the queues."""
        prompt = [self.draw.randrange(32, 36) for _ in range(self.draw.randint(1, 40))]
        stop = (self.draw.randrange(32, 127),) if self.draw.random() < 0.3 else ()
        options = {"temperature": 1.0, "seed": self.draw.randrange(9), "n": self.draw.choice([1, 1, 2])}
        max_tokens = self.draw.randint(1, 8)
        try:
            key = self.pair.submit(prompt, max_tokens, stop=stop, **options)
        except Overloaded:
            return
        self.asked[key] = (prompt, Sampling(max_tokens, stop, **options))

    def act(self) -> None:
        """Something happens."""
        open_receives = [
            key for key, wire in self.pair.wires.items() if wire.wanted is not None and not wire.receive_over
        ]
        match self.draw.randrange(12):
            case 0 | 1:
                self.submit()
            case 2 if self.asked:
                bench = self.draw.choice([self.pair.context, self.pair.generation])
                bench.abort(self.draw.choice(list(self.asked)))
            case 3:
                self.pair.write = not self.pair.write
            case 4 if open_receives:
                key = self.draw.choice(open_receives)
                settled, may_retry = self.draw.random() < 0.5, self.draw.random() < 0.5
                self.pair.fail(key, settled=settled, may_retry=settled and may_retry)
                if not settled:
                    self.unsettled.add(key)
            case _:
                self.pair.turn()

    def end(self) -> None:
        """Everything comes to its end; the router drops a leg whose partner has failed."""
        self.pair.write = True
        self.pair.run()
        for key in self.unsettled:
            self.pair.generation.deliver_receive(key, TransferFailure.WRITE_FAILED)
        self.pair.run()
        sides = (self.pair.context, self.pair.generation)
        while any(side.trails[key].end is None for side in sides for key in self.asked):
            self.pair.run()
            failed = [key for key in self.asked if self.failed(key)]
            before = sum(side.trails[key].end is None for side in sides for key in self.asked)
            for key in failed:
                for side in sides:
                    side.abort(key)
            self.pair.run()
            left = sum(side.trails[key].end is None for side in sides for key in self.asked)
            assert left < before or not left, "a leg hangs"
        for key in self.asked:
            if not self.complete(key):
                self.pair.context.abort(key)  # withdrawn by the router
        self.pair.run()

    def failed(self, key: RequestKey) -> bool:
        """True when the router ends both legs: one has failed, and the other one does not go on alone."""
        context, generation = (side.trails[key] for side in (self.pair.context, self.pair.generation))
        return _error(generation.end) or (_error(context.end) and generation.took_over is None)

    def complete(self, key: RequestKey) -> bool:
        """True when both legs have ended well."""
        context, generation = (side.trails[key].end for side in (self.pair.context, self.pair.generation))
        good = isinstance(context, ContextDone) or (isinstance(context, RequestFinished) and context.error is None)
        good |= self.pair.generation.trails[key].took_over is not None
        return good and isinstance(generation, RequestFinished) and generation.error is None


def _error(end: object) -> bool:
    return isinstance(end, RequestFinished) and end.error is not None


@pytest.mark.parametrize("seed", range(90))
def test_every_life_ends_with_nothing_left_and_no_wrong_token(seed: int):
    life = Life(seed)
    for _ in range(150):
        life.act()
    life.end()
    for key, (prompt, sampling) in life.asked.items():
        assert life.pair.generation.trails[key].end is not None, key
        for sample in range(sampling.n):
            right = oracle(prompt, sampling.max_tokens, sampling=sampling, sample=sample)
            ends = [index for index, token in enumerate(right) if token in sampling.stop_token_ids]
            right = right[: ends[0] + 1] if ends else right
            text = life.pair.text(key, sample)
            context, generation = (side.trails[key].answers for side in (life.pair.context, life.pair.generation))
            if life.complete(key):
                assert text == right, (key, sample)
            elif sample in context and life.pair.generation.trails[key].took_over is None:
                assert text == right[: len(text)], (key, sample)
            elif life.pair.generation.trails[key].took_over is not None:
                assert generation.get(sample, []) == right[: len(generation.get(sample, []))], (key, sample)
            else:
                assert sample not in generation, "no token of the generation leg before the first one is known"
    life.pair.check_idle()
