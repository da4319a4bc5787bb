"""ProcessEngine against real child processes: streams, faults, exits."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

import fake_engine
from fake_engine import ANSWER, DIE, DOUBT, GARBAGE, HOLD, REFUSE, STALL
from isthmus_core.config import parse_config
from isthmus_core.errors import (
    ConfigError,
    DuplicateRequest,
    InvalidRequest,
    IsthmusError,
    NoCapacity,
    StartError,
    WorkerLost,
)
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import (
    ContextReady,
    EngineRequest,
    Finished,
    FinishReason,
    KvEvent,
    RequestType,
    Sampling,
    Tokens,
)
from isthmus_worker.process_engine import EngineLaunch, ProcessEngine, child
from isthmus_worker.process_engine import engine as engine_module

pytestmark = pytest.mark.integration
BASE = 1 << 40
CONFIG = parse_config({"worker": {"instance_id": "w-0"}, "engine": {"kind": "mock"}, "model": {"name": "m"}})


def launch(mode: str = "ready", **changes: object) -> EngineLaunch:
    values: dict = {
        "config": CONFIG,
        "environment": {**os.environ, "FAKE_ENGINE": mode},
        "with_rank": False,
        "start_timeout_s": 30.0,
        "command": (sys.executable, str(Path(fake_engine.__file__))),
    }
    return EngineLaunch(**{**values, **changes})


@asynccontextmanager
async def running(mode: str = "ready", **options: Callable) -> AsyncGenerator[ProcessEngine, None]:
    engine = ProcessEngine(launch(mode), "w-0", **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def ask(what: int, number: int = 0, *, max_tokens: int = 4, kind: RequestType = RequestType.CONTEXT_AND_GENERATION):
    return EngineRequest(RequestKey(BASE + number), kind, (what, 5, 6), Sampling(max_tokens))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def test_requests_stream_side_by_side_and_leave_nothing():
    async with running() as engine:
        assert engine.load().total_blocks == fake_engine.TOTAL_BLOCKS

        async def one(number: int) -> None:
            events = [event async for event in engine.submit(ask(ANSWER, number, max_tokens=1 + number % 7))]
            ids = [token for event in events if isinstance(event, Tokens) for token in event.ids]
            assert ids == list(range(1 + number % 7))
            assert isinstance(events[-2], Tokens)
            assert events[-2].reason is FinishReason.LENGTH
            assert isinstance(events[-1], Finished)
            assert events[-1].report.decode_tokens == number % 7
            assert events[-1].report.prefill == pytest.approx(0.002)

        await asyncio.gather(*(one(number) for number in range(50)))
        await until(lambda: engine.open_requests == 0)


async def test_the_description_is_that_of_a_child_with_the_hubs_own_settings():
    engine = ProcessEngine(launch(), "w-0")
    description = await engine.start()
    assert description.name == "fake w-0"
    assert (description.max_model_len, description.total_blocks, description.kv_dtype) == (64, 100, "U8")
    await engine.stop()
    assert engine.exited.result().code == 0
    assert [event async for event in engine.kv_events()] == [KvEvent(reset=True)]


async def test_closing_a_stream_early_cancels_the_request():
    async with running() as engine:
        stream = engine.submit(ask(STALL))
        assert await anext(stream) == Tokens((42,))
        assert engine.open_requests == 1
        await stream.aclose()
        await until(lambda: engine.open_requests == 0)
        await until(lambda: engine.load().used_blocks == 0)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_an_aborted_stream_raises_cancelled_in_its_reader():
    async with running() as engine:
        stream = engine.submit(ask(STALL))
        await anext(stream)
        engine.abort(RequestKey(BASE))
        engine.abort(RequestKey(BASE))
        engine.abort(RequestKey(BASE + 999))
        with pytest.raises(IsthmusError, match="cancelled"):
            await anext(stream)
        await until(lambda: engine.open_requests == 0)


async def test_a_key_is_live_until_the_engine_has_released_it():
    async with running() as engine:
        stream = engine.submit(ask(DOUBT))
        await anext(stream)
        with pytest.raises(DuplicateRequest):
            engine.submit(ask(ANSWER))
        engine.abort(RequestKey(BASE))
        with pytest.raises(IsthmusError, match="cancelled"):
            await anext(stream)
        with pytest.raises(DuplicateRequest):
            engine.submit(ask(ANSWER))
        # Another try of the same request is another key.
        retry = EngineRequest(RequestKey(BASE, 1), RequestType.CONTEXT_AND_GENERATION, (ANSWER,), Sampling(1))
        assert isinstance([event async for event in engine.submit(retry)][-1], Finished)


async def test_a_context_leg_ends_with_its_pages_held_until_they_are_withdrawn():
    async with running() as engine:
        events = [event async for event in engine.submit(ask(HOLD, kind=RequestType.CONTEXT_ONLY))]
        assert isinstance(events[-1], ContextReady)
        assert events[-1].first_tokens == (Tokens((42,)),)
        await until(lambda: engine.load().used_blocks == 1)
        assert engine.open_requests == 1
        engine.abort(RequestKey(BASE))
        await until(lambda: engine.open_requests == 0)


async def test_refusals_are_typed_and_leave_nothing():
    async with running() as engine:
        with pytest.raises(IsthmusError) as caught:
            [event async for event in engine.submit(ask(REFUSE))]
        assert caught.value.code.name == "RESOURCE_EXHAUSTED"
        assert caught.value.detail is not None
        with pytest.raises(InvalidRequest):
            engine.submit(EngineRequest(RequestKey(7), RequestType.CONTEXT_ONLY, (1,), Sampling(1)))
        await until(lambda: engine.open_requests == 0)


async def test_drain_refuses_new_requests_and_waits_for_the_running_ones():
    async with running() as engine:
        stream = engine.submit(ask(STALL))
        await anext(stream)
        with pytest.raises(TimeoutError):
            await engine.drain(0.05)
        with pytest.raises(NoCapacity, match="draining"):
            engine.submit(ask(ANSWER, 1))
        await stream.aclose()
        await engine.drain(10)


async def test_a_child_that_dies_fails_every_stream_with_its_phase():
    async with running() as engine:
        prefilling = engine.submit(ask(HOLD, 1, kind=RequestType.CONTEXT_ONLY))
        assert isinstance([event async for event in prefilling][-1], ContextReady)
        decoding = engine.submit(ask(STALL, 2))
        await anext(decoding)
        dying = engine.submit(ask(DIE, 3))
        await anext(dying)
        for stream in (decoding, dying):
            with pytest.raises(WorkerLost) as caught:
                await anext(stream)
            assert caught.value.detail.phase == "decode"
            assert caught.value.detail.instance_id == "w-0"
            assert caught.value.detail.key.request_id == stream.request.key.request_id
        report = await engine.exited
        assert report.code == 7
        assert report.last_line == "out of luck"
        assert "left with code 7: out of luck" in str(report)
        assert engine.open_requests == 0
        with pytest.raises(NoCapacity, match="gone"):
            engine.submit(ask(ANSWER, 4))
        engine.abort(RequestKey(BASE + 2))


async def test_a_killed_child_is_reported_with_its_signal():
    async with running() as engine:
        stream = engine.submit(ask(STALL))
        await anext(stream)
        (process,) = psutil.Process().children()
        process.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLost):
            await anext(stream)
        report = await engine.exited
        assert "SIGKILL" in str(report)


async def test_a_child_that_talks_nonsense_is_killed():
    async with running() as engine:
        stream = engine.submit(ask(GARBAGE))
        await anext(stream)
        with pytest.raises(WorkerLost):
            await anext(stream)
        assert (await engine.exited).code == -signal.SIGKILL


async def test_a_listener_that_fails_ends_the_child_at_once(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "_STOP_S", 1000)

    def explode(_: object) -> None:
        raise ValueError("a bug in the hub")

    async with running(on_load=explode) as engine:
        stream = engine.submit(ask(STALL))
        with pytest.raises(WorkerLost):
            [event async for event in stream]
        assert (await engine.exited).code == -signal.SIGKILL


async def test_a_child_that_closes_its_socket_and_stays_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "_STOP_S", 0.3)
    async with running("closes") as engine:
        assert (await engine.exited).code == -signal.SIGKILL


async def test_a_child_that_does_not_leave_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "_STOP_S", 0.3)
    async with running("stubborn") as engine:
        stream = engine.submit(ask(STALL))
        await anext(stream)
    assert engine.exited.result().code == -signal.SIGKILL
    with pytest.raises(WorkerLost):
        await anext(stream)
    await engine.stop()


@pytest.mark.parametrize(
    ("mode", "kind", "words"),
    [
        ("settings", ConfigError, "engine.device = tpu: not known"),
        ("start", StartError, "model.path: no such folder"),
        ("crash", StartError, "a bug at start"),
    ],
)
async def test_a_failed_start_says_why(mode: str, kind: type[Exception], words: str):
    engine = ProcessEngine(launch(mode), "w-0")
    with pytest.raises(kind, match=words):
        await engine.start()
    assert not psutil.Process().children()


async def test_a_start_that_hangs_is_bounded():
    engine = ProcessEngine(launch("hang", start_timeout_s=0.5), "w-0")
    with pytest.raises(StartError, match=r"0\.5 s \(worker\.engine_start_timeout_s\)"):
        await engine.start()
    assert not psutil.Process().children()


async def test_a_cancelled_start_leaves_no_process():
    engine = ProcessEngine(launch("hang"), "w-0")
    starting = asyncio.create_task(engine.start())
    await until(lambda: bool(psutil.Process().children()))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not psutil.Process().children()


async def test_a_command_that_does_not_exist():
    engine = ProcessEngine(launch(command=("/no/such/python",)), "w-0")
    with pytest.raises(StartError, match="/no/such/python"):
        await engine.start()


async def test_the_childs_output_reaches_the_hubs_stderr(capfd: pytest.CaptureFixture[str], monkeypatch):
    written: list[str] = []
    monkeypatch.setattr(child.sys.stderr, "write", written.append)
    engine = ProcessEngine(launch("start"), "w-0")
    with pytest.raises(StartError):
        await engine.start()
    assert "".join(written) == "model.path: no such folder\n"
