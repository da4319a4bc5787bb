"""Any order of submits, steps, aborts and outcomes: right text, one end and one release each, every block back."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_core.errors import InvalidRequest, Overloaded
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, FinishReason
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.ports import TransferFailure
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache

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
    }
)


class World:
    """One instance of each kind under one list of operations. `prompts` by key; a split request has one key on both."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.unsplit = Bench(**sizes, max_model_len=48)
        self.context = Bench("context", **sizes, max_model_len=48)
        self.generation = Bench("generation", **sizes, max_model_len=48)
        self.benches = (self.unsplit, self.context, self.generation)
        self.prompts: dict[RequestKey, tuple[list[int], int]] = {}
        # Receives of which the hub has told an unsettled failure.
        self.failed: set[RequestKey] = set()

    def run(self, operation: str, draw: int) -> None:
        bench = self.benches[draw % 3]
        if operation == "submit":
            self.submit((self.unsplit, self.context)[draw % 2], draw)
        elif operation == "step":
            bench.step()
        elif operation == "abort" and bench.trails:
            bench.abort(list(bench.trails)[draw // 3 % len(bench.trails)])
        elif operation == "handoff":
            self.hand_off(draw)
        elif operation in ("settle", "fail"):
            self.hub(operation, draw)

    def submit(self, bench: Bench, draw: int) -> None:
        prompt = [32 + (draw + index * 13) % 95 for index in range(1 + draw % 29)]
        max_tokens = 1 + draw // 7 % 19
        try:
            self.prompts[bench.submit(prompt, max_tokens)] = (prompt, max_tokens)
        except (InvalidRequest, Overloaded):
            return

    def hand_off(self, draw: int) -> None:
        """The router starts the generation leg of a context leg that is done; now and then one that nobody holds."""
        done = [key for key, trail in self.context.trails.items() if isinstance(trail.end, ContextDone)]
        ready = [key for key in done if key not in self.generation.trails]
        held = [key for key in ready if key in self.context.exposed]
        ready = held if held and draw % 4 else ready
        if not ready:
            return
        key = ready[draw % len(ready)]
        prompt, max_tokens = self.prompts[key]
        phase = ContextPhase(key, tuple(self.context.trails[key].tokens), len(prompt), HOLDER)
        try:
            self.generation.submit(prompt, max_tokens, key=key, phase=phase)
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
                prompt, max_tokens = self.prompts[key]
                first = self.context.trails[key].tokens if bench is self.generation else []
                tokens = [*first, *trail.tokens]
                assert tokens == oracle(prompt, max_tokens)[: len(tokens)]
                if isinstance(trail.end, RequestFinished) and trail.end.reason is not None:
                    assert trail.end.reason is FinishReason.LENGTH
                    assert len(tokens) == max_tokens


@settings(max_examples=150, deadline=None)
@given(operations=OPERATIONS, sizes=SIZES)
def test_any_order_of_operations(operations: list[tuple[str, int]], sizes: dict[str, int]):
    world = World(sizes)
    for operation, draw in operations:
        world.run(operation, draw)
    world.finish()
    world.check()


@pytest.mark.parametrize("seed", range(5))
def test_long_mixed_load(seed: int):
    sizes = {"num_blocks": 16, "tokens_per_block": 3, "max_running": 6, "max_batch_tokens": 11, "max_waiting": 8}
    world = World(sizes)
    random = Random(seed)
    names = ("submit", "step", "step", "step", "handoff", "settle", "settle", "fail", "abort", "step", "step", "step")
    for _ in range(5000):
        world.run(random.choice(names), random.randrange(1 << 20))
    world.finish()
    world.check()
    for bench in (world.unsplit, world.generation):
        done = [trail for trail in bench.trails.values() if isinstance(trail.end, RequestFinished) and trail.end.reason]
        assert len(done) >= 5, "too few requests came through for this to prove anything"
