"""Any order of submits, steps, aborts and outcomes: right text, one end and one release each, every block back."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_core.errors import InvalidRequest, Overloaded
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, FinishReason, Sampling
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.config import OnFailure
from kvtransfer.ports import TransferFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, Trail, copy_cache, new_key

RECOVERS = HandoffPolicy(retries=1, on_failure=OnFailure.RECOMPUTE, max_held_blocks=8)
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "step", "step", "step", "abort", "settle", "settle", "fail", "handoff"]),
        st.integers(0, 1 << 16),
    ),
    max_size=80,
)
SIZES = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(6, 20),
        "tokens_per_block": st.integers(1, 5),
        "max_running": st.integers(1, 5),
        "max_batch_tokens": st.integers(1, 20),
        "max_waiting": st.integers(1, 6),
        "recovers": st.booleans(),
    }
)


def done_of(bench: Bench, key: RequestKey) -> ContextDone:
    """The end of a context leg that holds its pages."""
    end = bench.trails[key].end
    assert isinstance(end, ContextDone)
    return end


@dataclass(frozen=True)
class Asked:
    """One request of the test, and what the model says to it."""

    prompt: list[int]
    sampling: Sampling
    salt: bytes

    @classmethod
    def drawn(cls, draw: int) -> Asked:
        """Few beginnings, so that prompts share blocks; few salts; one to three answers."""
        prompt = [32 + (draw % 3 * 31 + index * 13) % 95 for index in range(1 + draw // 3 % 29)]
        stop = tuple(range(32, 32 + draw // 5 % 3 * 4))
        answers = (1, 1, 2, 3)[draw // 11 % 4]
        sampling = Sampling(1 + draw // 7 % 19, stop, temperature=draw // 13 % 2, seed=draw, n=answers)
        return cls(prompt, sampling, (b"", b"tenant")[draw // 17 % 2])

    def answer(self, sample: int) -> tuple[list[int], FinishReason]:
        """All tokens of an answer, and why it ends."""
        tokens = oracle(self.prompt, self.sampling.max_tokens, sampling=self.sampling, sample=sample)
        for index, token in enumerate(tokens):
            if token in self.sampling.stop_token_ids:
                return tokens[: index + 1], FinishReason.STOP
        return tokens, FinishReason.LENGTH


class World:
    """One instance of each kind under one list of operations. `prompts` by key; a split request has one key on both."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        sizes = dict(sizes)
        policy = RECOVERS if sizes.pop("recovers") else None
        self.unsplit = Bench(**sizes, max_model_len=48)
        self.context = Bench("context", **sizes, max_model_len=48, policy=policy)
        self.generation = Bench("generation", **sizes, max_model_len=48, policy=policy)
        self.benches = (self.unsplit, self.context, self.generation)
        self.asked: dict[RequestKey, Asked] = {}
        # Receives of which the hub has told an unsettled failure.
        self.failed: set[RequestKey] = set()

    def run(self, operation: str, draw: int) -> None:
        bench = self.benches[draw % 3]
        if operation == "submit":
            self.submit((self.unsplit, self.context)[draw % 2], draw)
        elif operation == "step":
            bench.step()
            for key in self.failed & self.generation.exposed.keys():
                self.generation.memory[self.generation.exposed[key]] = draw % 251  # a writer that was not stopped
        elif operation == "abort" and bench.trails:
            bench.abort(list(bench.trails)[draw // 3 % len(bench.trails)])
        elif operation == "handoff":
            self.hand_off(draw)
        elif operation in ("settle", "fail"):
            self.hub(operation, draw)

    def submit(self, bench: Bench, draw: int) -> None:
        asked = Asked.drawn(draw)
        key = new_key()
        try:
            bench.submit_as(asked.prompt, asked.sampling, key=key, salt=asked.salt)
        except (InvalidRequest, Overloaded):
            return
        self.asked[key] = asked

    def hand_off(self, draw: int) -> None:
        """The router starts the generation leg of a context leg that is done; now and then one that nobody holds."""
        done = [key for key, trail in self.context.trails.items() if isinstance(trail.end, ContextDone)]
        ready = [key for key in done if key not in self.generation.trails]
        held = [key for key in ready if key in self.context.exposed]
        ready = held if held and draw % 4 else ready
        if not ready:
            return
        key = ready[draw % len(ready)]
        asked = self.asked[key]
        phase = ContextPhase(key, done_of(self.context, key).first_tokens, len(asked.prompt), HOLDER)
        try:
            self.generation.submit_as(asked.prompt, asked.sampling, key=key, phase=phase, salt=asked.salt)
        except (InvalidRequest, Overloaded):
            return

    def hub(self, operation: str, draw: int) -> None:
        """One hand-off that is under way goes on."""
        waiting = list(self.generation.exposed)
        if draw % 5 == 0 or not waiting:
            offers = list(self.context.exposed)
            if offers:
                self.context.deliver_send(offers[draw % len(offers)], TransferFailure.EXPIRED)
            return
        key = waiting[draw % len(waiting)]
        if operation == "fail" and key not in self.failed:
            if draw % 3 == 0 and key in self.context.exposed:
                self.generation.deliver_receive(key, TransferFailure.WRITE_FAILED, may_retry=True)
                return
            self.failed.add(key)
            self.generation.deliver_receive(key, TransferFailure.TIMED_OUT, settled=False)
        elif key in self.failed or key not in self.context.exposed:
            self.generation.deliver_receive(key, TransferFailure.NOT_HELD)
        else:
            copy_cache(self.context, self.generation, key)
            self.generation.deliver_receive(key)
            self.context.deliver_send(key)

    def finish(self) -> None:
        """Everything that is left comes to its end."""
        for _ in range(500):
            moved = [bench.step() for bench in self.benches]
            if self.generation.exposed:
                self.hub("settle", 1)
            elif self.context.exposed:
                self.context.deliver_send(next(iter(self.context.exposed)))
            elif not any(moved) and not any(bench.scheduler.live for bench in self.benches):
                return
        raise AssertionError("does not come to rest")

    def check(self) -> None:
        for bench in self.benches:
            bench.check_idle()
            for key, trail in bench.trails.items():
                asked = self.asked[key]
                before = self.context.trails[key] if bench is self.generation else Trail()
                good = isinstance(trail.end, RequestFinished) and trail.end.error is None
                for sample in range(asked.sampling.n):
                    tokens = [*before.answers.get(sample, []), *trail.answers.get(sample, [])]
                    reason = before.reasons.get(sample) or trail.reasons.get(sample)
                    expected, why = asked.answer(sample)
                    assert tokens == expected[: len(tokens)], (key, sample)
                    assert not good or tokens == expected
                    assert reason is (why if tokens == expected else None)


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, sizes=SIZES)
def test_any_order_of_operations(operations: list[tuple[str, int]], sizes: dict[str, Any]):
    world = World(sizes)
    for operation, draw in operations:
        world.run(operation, draw)
    world.finish()
    world.check()


@pytest.mark.parametrize("recovers", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_long_mixed_load(seed: int, recovers: bool):
    sizes = {
        "recovers": recovers,
        "num_blocks": 16,
        "tokens_per_block": 3,
        "max_running": 6,
        "max_batch_tokens": 11,
        "max_waiting": 8,
    }
    world = World(sizes)
    random = Random(seed)
    often = ("step",) * 8 + ("settle",) * 3 + ("submit", "handoff") * 2
    names = (*often, "fail", "abort")
    for _ in range(3000):
        world.run(random.choice(names), random.randrange(1 << 20))
    world.finish()
    world.check()
    for bench in (world.unsplit, world.generation):
        ends = [trail.end for trail in bench.trails.values()]
        assert sum(isinstance(end, RequestFinished) and end.error is None for end in ends) >= 5, (
            "too few requests came through for this to prove anything"
        )
