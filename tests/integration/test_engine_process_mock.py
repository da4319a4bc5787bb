"""A real engine process with the mock model, the test as its hub: requests, refusals, starts that fail, ends."""

from __future__ import annotations

import fcntl
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from engine_process import EngineUnderTest, engines, settings
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineLoad, EngineRequest, Finished, FinishReason, KvEvent, RequestType, Sampling
from isthmus_worker.wire.engine_frames import Abort, LegReleased, LegTokens, Stop
from kvtransfer.ports import SendOutcome
from mock_oracle import oracle

pytestmark = pytest.mark.integration
Make = Callable[..., EngineUnderTest]
KEY = RequestKey(1 << 40)


@pytest.fixture(name="make")
def _make() -> Iterator[Make]:
    with engines() as make:
        yield make


def request(prompt, max_tokens: int, number: int = 0, stop=()) -> EngineRequest:
    key = RequestKey((1 << 40) + number)
    leg = RequestType.CONTEXT_AND_GENERATION
    return EngineRequest(key, leg, tuple(prompt), Sampling(max_tokens, tuple(stop)))


def idle(engine: EngineUnderTest) -> EngineLoad:
    """What the hub believes after the last release: an engine that holds nothing."""
    load = [event for event in engine.events if isinstance(event, EngineLoad)][-1]
    assert load == EngineLoad(total_blocks=load.total_blocks)
    return load


def test_it_says_what_it_is_and_that_it_is_idle(make: Make):
    engine = make(settings(engine={"tokens_per_block": 8, "num_blocks": 99, "max_model_len": 500}))
    ready = engine.ready()
    assert (ready.name, ready.max_model_len, ready.tokens_per_block) == ("mock", 500, 8)
    assert (ready.total_blocks, ready.vocab_size) == (99, 257)
    assert engine.next_of(EngineLoad) == EngineLoad(total_blocks=99)
    engine.send(Stop())
    assert engine.outcome() == (0, "")


def test_50_requests_at_once_are_all_right(make: Make):
    engine = make(settings(engine={"num_blocks": 64, "max_running": 16, "max_batch_tokens": 100}))
    draw = random.Random(4)
    prompts = [[draw.randrange(257) for _ in range(draw.randint(1, 400))] for _ in range(50)]
    requests = [request(prompt, 12, number) for number, prompt in enumerate(prompts)]
    engine.ready()
    texts = engine.run(*requests)
    for one, prompt in zip(requests, prompts, strict=True):
        assert texts[one.key] == oracle(prompt, 12), f"prompt of {len(prompt)} tokens"
        end = engine.finished(one.key)
        assert isinstance(end, Finished)
        assert engine.last_tokens(one.key).reason is FinishReason.LENGTH
        assert end.report.decode_tokens == 11
        assert end.report.prefill is not None
        assert end.report.context_queue is not None
    assert idle(engine).total_blocks == 64
    engine.send(Stop())
    assert engine.outcome()[0] == 0


def test_another_seed_and_bigger_blocks(make: Make):
    options = {"seed": 9, "layers": 3, "bytes_per_token": 64}
    engine = make(settings(engine={"mock": options}))
    engine.ready()
    assert engine.run(request([65] * 40, 6))[KEY] == oracle([65] * 40, 6, **options)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (request([], 4), "prompt"),
        (request([300], 4), "prompt"),
        (request([65], 0), "sampling.max_tokens"),
        (request([65] * 9000, 4), "8191"),
        (request([65] * 4000, 4000), "KV cache"),
        (EngineRequest(KEY, RequestType.CONTEXT_ONLY, (65,), Sampling(4)), "request_type"),
    ],
)
def test_refusals_are_typed_and_the_engine_goes_on(make: Make, bad: EngineRequest, words: str):
    engine = make()
    engine.ready()
    engine.run(bad)
    error = engine.failure(KEY)
    assert error is not None
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in error.message
    assert engine.run(request([65], 3, 1))[RequestKey(KEY.request_id + 1)] == oracle([65], 3)


def test_a_full_queue_refuses(make: Make):
    engine = make(settings(engine={"max_waiting": 1, "max_running": 1, "mock": {"decode_us": 1000}}))
    engine.ready()
    requests = [request([65], 50, number) for number in range(3)]
    engine.run(*requests)
    errors = [engine.failure(one.key) for one in requests]
    refused = [error for error in errors if error is not None]
    assert refused
    assert all(error.code is grpc.StatusCode.RESOURCE_EXHAUSTED for error in refused)


def test_abort_ends_a_running_and_a_waiting_request(make: Make):
    engine = make(settings(engine={"max_running": 1, "mock": {"decode_us": 2000}}))
    engine.ready()
    running, waiting = request([65], 4000, 0), request([66], 4000, 1)
    engine.send(running, waiting)
    engine.next_of(LegTokens)
    engine.send(Abort(running.key), Abort(waiting.key), Abort(RequestKey(1 << 50)))
    for _ in range(2):
        engine.next_of(LegReleased)
    for one in (running, waiting):
        error = engine.failure(one.key)
        assert error is not None
        assert error.code is grpc.StatusCode.CANCELLED
    idle(engine)
    assert engine.run(request([67], 5, 2))[RequestKey(KEY.request_id + 2)] == oracle([67], 5)


def test_the_end_of_the_hub_is_the_end_of_the_engine(make: Make):
    engine = make(settings(engine={"mock": {"decode_us": 1000}}))
    engine.ready()
    engine.send(request([65], 4000))
    engine.next_of(LegTokens)
    engine.leave()
    assert engine.outcome()[0] == 0


def test_signals_to_the_whole_group_are_the_hubs_business(make: Make):
    engine = make()
    engine.ready()
    engine.process.send_signal(signal.SIGINT)
    engine.process.send_signal(signal.SIGTERM)
    assert engine.run(request([65], 5))[KEY] == oracle([65], 5)
    engine.send(Stop())
    assert engine.outcome()[0] == 0


def test_a_killed_hub_takes_the_engine_with_it(tmp_path: Path):
    """The test holds the other end of the socket: only the kernel can tell the engine."""
    ours, theirs = socket.socketpair()
    config = tmp_path / "config.yaml"
    config.write_text("engine: {kind: mock, num_blocks: 8}\nmodel: {name: mock}\n")
    script = (
        "import subprocess, sys, time\n"
        f"fd = {theirs.fileno()}\n"
        "command = [sys.executable, '-m', 'isthmus_worker.engine_process', '--config', sys.argv[1]]\n"
        "subprocess.Popen([*command, '--scheduler-fd', str(fd)], pass_fds=[fd])\n"
        "time.sleep(100)\n"
    )
    hub = subprocess.Popen([sys.executable, "-c", script, config], pass_fds=[theirs.fileno()])
    try:
        with ours:
            theirs.close()
            assert ours.recv(1), "the engine has said that it is ready"
            hub.kill()
            while ours.recv(4096):
                pass
    finally:
        hub.kill()
        hub.wait()


def test_it_holds_the_instance_lock_as_long_as_it_lives(make: Make, tmp_path: Path):
    path = tmp_path / "lock"
    with path.open("w") as hubs:
        fcntl.flock(hubs, fcntl.LOCK_SH)
        engine = make(lock_fd=hubs.fileno())
        engine.ready()
    with path.open("w") as successor:
        with pytest.raises(BlockingIOError):
            fcntl.flock(successor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        engine.send(Stop())
        assert engine.outcome()[0] == 0
        fcntl.flock(successor, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("config", "code", "words"),
    [
        (settings(engine={"kind": "torch"}, model={"name": None}), 2, "model.path is not set"),
        (settings(engine={"kind": "torch"}, model={"path": "/no/such/folder"}), 3, "/no/such/folder"),
        (
            settings(engine={"num_blocks": None, "kv_cache_bytes": 1 << 16, "mock": {"bytes_per_token": 1 << 16}}),
            2,
            "kv",
        ),
        (
            settings(engine={"num_blocks": 1 << 26, "mock": {"bytes_per_token": 1 << 20}}),
            3,
            "does not fit",
        ),
        (settings(engine={"max_model_len": 9000}), 2, "engine.max_model_len = 9000"),
        (settings(engine={"colour": 1}), 2, "unknown key engine.colour"),
        (settings(worker={"role": "context"}), 2, "--rank-fd"),
    ],
)
def test_starts_that_fail_say_why_in_the_last_line(make: Make, config, code: int, words: str):
    engine = make(config)
    left, line = engine.outcome()
    assert (left, words in line) == (code, True), line
    assert not engine.events


def test_a_transfer_backend_that_does_not_exist(make: Make):
    engine = make(settings(worker={"role": "context"}, transfer={"backend": "telepathy"}), with_rank=True)
    code, line = engine.outcome()
    assert code == 2
    assert "telepathy" in line
    assert "nixl" in line


def test_a_role_that_hands_off_needs_a_backend(make: Make):
    code, line = make(settings(worker={"role": "context"}), with_rank=True).outcome()
    assert code == 2
    assert "transfer.backend" in line


def test_a_file_descriptor_that_is_not_there(make: Make):
    code, line = make(arguments=["--lock-fd", "9999"]).outcome()
    assert code == 2
    assert "--lock-fd 9999" in line


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff", b"\x0a\x00", b"\x0a\x02\x0a\x00"], ids=["no message", "no body", "no key"]
)
def test_a_frame_that_can_not_be_read_ends_the_engine(make: Make, frame: bytes):
    engine = make()
    engine.ready()
    engine.frames.send(frame)
    code, line = engine.outcome()
    assert code == 1
    assert "malformed" in line


@pytest.mark.parametrize("broken", ["a live key again", "an outcome without a hand-off"])
def test_a_hub_that_breaks_its_promises_ends_the_engine(make: Make, broken: str):
    engine = make(settings(engine={"mock": {"decode_us": 1000}}))
    engine.ready()
    if broken == "a live key again":
        engine.send(request([65], 4000), request([65], 4000))
    else:
        engine.send(SendOutcome(KEY))
    code, line = engine.outcome()
    assert code == 1
    assert str(KEY) in line


def test_a_stream_that_is_cut_inside_a_frame(make: Make):
    engine = make()
    engine.ready()
    os.write(engine.frames.fileno(), struct.pack("<I", 100) + b"abc")
    engine.leave()
    code, line = engine.outcome()
    assert code == 1
    assert "100 bytes" in line


def test_it_needs_no_torch(make: Make):
    engine = make()
    engine.ready()
    maps = Path(f"/proc/{engine.process.pid}/maps").read_text()
    assert "libtorch" not in maps


def test_n_answers_and_a_prompt_that_was_here_before(make: Make):
    engine = make(settings(engine={"num_blocks": 64}))
    engine.ready()
    sampling = Sampling(12, temperature=1.0, seed=3, n=3, logprobs=2)
    prompt = tuple(32 + index * 7 % 95 for index in range(100))
    cached: list[int] = []
    for number, salt in enumerate((b"", b"", b"tenant")):
        key = RequestKey(KEY.request_id + number)
        one = EngineRequest(key, RequestType.CONTEXT_AND_GENERATION, prompt, sampling, cache_salt=salt)
        engine.run(one)
        for sample in range(3):
            chunks = engine.chunks(key, sample)
            assert [token for chunk in chunks for token in chunk.ids] == oracle(
                prompt, 12, sampling=sampling, sample=sample
            )
            assert all(len(chunk.logprobs) == len(chunk.ids) for chunk in chunks)
            assert [chunk.reason for chunk in chunks if chunk.reason] == [FinishReason.LENGTH]
        cached.append(engine.finished(key).report.cached_tokens)
    assert cached == [0, 96, 0]
    idle(engine)
    events = [event for event in engine.events if isinstance(event, KvEvent)]
    assert sum(len(event.stored) for event in events) >= 2 * 6


def test_no_reuse_when_it_is_off(make: Make):
    engine = make(settings(engine={"num_blocks": 64, "prefix_caching": False}))
    engine.ready()
    engine.run(request([65] * 100, 3, 0))
    second = request([65] * 100, 3, 1)
    assert engine.run(second)[second.key] == oracle([65] * 100, 3)
    assert engine.finished(second.key).report.cached_tokens == 0
    assert not [event for event in engine.events if isinstance(event, KvEvent)]
