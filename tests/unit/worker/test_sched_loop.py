"""The executor loop under a virtual clock: what it says, when it sleeps, how it ends."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from isthmus_core.config import parse_config
from isthmus_core.errors import InternalError
from isthmus_worker.cache.base import Need
from isthmus_worker.engine import ContextPhase, EngineLoad, EngineRequest, RequestType, Sampling, Tokens
from isthmus_worker.engine_process.build import build_front
from isthmus_worker.engine_process.frames import EngineMessage
from isthmus_worker.engine_process.inbox import HubGone
from isthmus_worker.engine_process.load import load_model
from isthmus_worker.engine_process.loop import EngineLoop
from isthmus_worker.engine_process.outbox import Outbox
from isthmus_worker.scheduler import RequestFinished, RequestReleased, RequestTokens
from isthmus_worker.wire.engine_frames import Abort, EngineCommand, Stop
from kvtransfer.ports import ReceiveOutcome, ReceiveRequest
from mock_oracle import oracle
from sched_bench import HOLDER, new_key


class Script:
    """Inbox, clock, runner and socket in one: every step takes `step_s`, every wait is over when the next command is
    due. `waits` are the sleeps that the loop asked for, with the time at which it did."""

    def __init__(self, step_s: float = 0.01) -> None:
        self.now, self.step_s = 0.0, step_s
        self.due: list[tuple[float, EngineCommand | HubGone]] = []
        self.waits: list[tuple[float, float | None]] = []
        self.said: list[tuple[float, EngineMessage]] = []
        self.frames = 0
        self.order: list[str] = []
        self.fails: Callable[[], None] = lambda: None

    def at(self, when: float, *commands: EngineCommand | HubGone) -> None:
        self.due += [(when, command) for command in commands]

    def take(self, wait_s: float | None = 0.0) -> list[EngineCommand | HubGone]:
        if wait_s != 0.0:
            self.waits.append((self.now, wait_s))
            until = float("inf") if wait_s is None else self.now + wait_s
            assert self.due or wait_s is not None, "sleeps for ever and nothing will come"
            self.now = max(self.now, min(until, self.due[0][0] if self.due else until))
        taken = [command for when, command in self.due if when <= self.now]
        self.due = self.due[len(taken) :]
        return taken

    def send(self, frame: bytes) -> None:
        assert frame
        self.fails()
        self.frames += 1
        self.order.append("frame")

    def copy_blocks(self, *blocks) -> None:
        self.order.append("copies")
        self._runner.copy_blocks(*blocks)

    def execute(self, rows):
        self.order.append("rows")
        self.now += self.step_s
        return self._runner.execute(rows)

    def run(self, role: str = "context_and_generation") -> None:
        config = parse_config(
            {
                "engine": {"kind": "mock", "num_blocks": 64, "mock": {"max_model_len": 512}},
                "model": {"name": "mock"},
                "worker": {"role": role},
            }
        )
        model = load_model(config)
        self._runner = model.runner
        self.outbox = Outbox(self)
        emit = self.outbox.emit
        self.outbox.emit = lambda message: (self.said.append((self.now, message)), emit(message))[1]
        self.scheduler = build_front(config, model, self.outbox)
        EngineLoop(self.scheduler, self, self, self.outbox, lambda: self.now).run()

    def of(self, kind) -> list:
        return [message for _, message in self.said if isinstance(message, kind)]


def request(prompt, max_tokens: int, **options) -> EngineRequest:
    options = {"key": new_key(), "request_type": RequestType.CONTEXT_AND_GENERATION, **options}
    return EngineRequest(prompt=tuple(prompt), sampling=Sampling(max_tokens), **options)


def test_one_frame_a_step_and_no_sleep_while_there_is_work():
    script = Script()
    one = request([65] * 20, 10)
    script.at(0.0, one)
    script.at(9.0, Stop())
    script.run()
    assert [token for event in script.of(RequestTokens) for token in event.chunk.ids] == oracle([65] * 20, 10)
    assert script.frames == 10
    assert [wait for _, wait in script.waits] == [None]


def test_copies_come_before_the_step_and_before_anything_is_said():
    script = Script()
    sampling = Sampling(5, temperature=1.0, n=2)
    script.at(0.0, EngineRequest(new_key(), RequestType.CONTEXT_AND_GENERATION, (65,) * 20, sampling))
    script.at(9.0, Stop())
    script.run()
    for sample in range(2):
        said = [event.chunk.ids[0] for event in script.of(RequestTokens) if event.chunk.sample == sample]
        assert said == oracle([65] * 20, 5, sampling=sampling, sample=sample)
    assert script.order[:5] == ["rows", "frame", "copies", "rows", "frame"]
    assert script.order.count("copies") == 1


def test_load_is_told_a_few_times_a_second_and_at_once_when_idle():
    script = Script(step_s=0.01)
    script.at(0.0, request([65], 101), request([66], 201))
    script.at(9.0, request([65], 1))
    script.at(99.0, Stop())
    script.run()
    told = [(when, load) for when, load in script.said if isinstance(load, EngineLoad)]
    busy = [when for when, load in told if load.running_requests]
    assert busy
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(busy))
    idle = [when for when, load in told if load == EngineLoad(total_blocks=64)]
    assert pytest.approx(idle[0], abs=1e-6) == 0.2 * 10 + 0.01, "in the very step in which the last request ended"
    assert [wait for _, wait in script.waits] == [None, None]


def test_it_sleeps_until_the_hub_speaks_while_a_cache_is_on_its_way():
    script, key = Script(), new_key()
    phase = ContextPhase(key, (Tokens((65,)),), 20, HOLDER)
    leg = request([65] * 20, 3, key=key, request_type=RequestType.GENERATION_ONLY, context_phase=phase)
    script.at(0.1, leg)
    script.at(5.0, ReceiveOutcome(key, settled=True))
    script.at(9.0, Stop())
    script.run("generation")
    assert [when for when, _ in script.waits] == [0.0, 0.1, 0.2, 5.02]
    assert [wait for _, wait in script.waits] == [None, pytest.approx(0.1), None, None]
    loads = [load for load in script.of(EngineLoad) if load.running_requests]
    assert loads[0].used_blocks == 2, "what is on its way counts"
    assert len(script.of(RequestReleased)) == 1


def test_a_refused_request_is_answered_and_gone():
    script = Script()
    bad = request([], 3)
    script.at(0.0, bad)
    script.at(1.0, Stop())
    script.run()
    assert [type(message) for _, message in script.said[:2]] == [RequestFinished, RequestReleased]
    (finished,) = script.of(RequestFinished)
    assert finished.key == bad.key
    assert finished.error is not None


@pytest.mark.parametrize("end", [Stop(), HubGone()])
def test_nothing_follows_a_stop(end):
    script = Script()
    script.at(0.0, request([65], 3), end, request([66], 3))
    script.run()
    assert not script.said


def test_a_hub_that_is_gone_when_something_is_to_be_said_is_the_end():
    def gone() -> None:
        raise ConnectionError

    script = Script()
    script.fails = gone
    script.at(0.0, request([65], 50))
    script.run()
    assert len(script.of(RequestTokens)) == 1


def test_a_leak_is_found_as_soon_as_the_engine_is_idle():
    script = Script()
    one = request([65], 5)
    script.at(0.0, one)
    script.at(1.0, Stop())

    def leak() -> None:
        if script.scheduler.live:
            blocks = script.scheduler._schedulers[0]._memory.cache._blocks
            blocks._tables[one.key, 0] = blocks.table((one.key, 0))[:0]

    script.fails = leak
    with pytest.raises(InternalError, match="block ledger is broken"):
        script.run()


def test_blocks_that_belong_to_nobody_are_found_as_soon_as_the_engine_is_idle():
    script = Script()
    script.at(0.0, request([65], 5))
    script.at(1.0, Stop())

    def take() -> None:
        cache = script.scheduler._schedulers[0]._memory.cache
        if not cache.holds("somebody who is gone"):
            cache.allocate("somebody who is gone", Need(1, 1, 1))

    script.fails = take
    with pytest.raises(InternalError, match="0 answers wait, 0 run and 1 blocks are held"):
        script.run()


@pytest.mark.parametrize("command", [ReceiveOutcome(new_key(), settled=True)])
def test_outcomes_on_an_instance_that_hands_nothing_off_are_a_bug(command):
    script = Script()
    script.at(0.0, command)
    with pytest.raises(InternalError, match="hands nothing off"):
        script.run()


def test_an_abort_of_an_unknown_key_changes_nothing():
    script = Script()
    script.at(0.0, Abort(new_key()))
    script.at(1.0, Stop())
    script.run()
    assert script.of(EngineLoad) == [EngineLoad(total_blocks=64)]
    assert not script.of(ReceiveRequest)
