"""The worker as a process of its own, mock engine behind it: serving, faults, leaving."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import grpc
import psutil
import pytest

from fake_coordinator import FakeCoordinator
from isthmus_core.errors import IsthmusError, from_rpc_error, retry_after_s
from isthmus_core.generation import chunk_from_pb, sampling_to_pb
from isthmus_core.process import free_port
from isthmus_worker.engine import FinishReason, Sampling
from mock_oracle import oracle
from worker_process import BASE, WorkerProcess, leg, tokens, worker

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]
SLOW = "engine.mock.decode_us=20000"


@pytest.fixture(name="coordinator")
async def _coordinator() -> AsyncGenerator[FakeCoordinator, None]:
    async with FakeCoordinator() as coordinator:
        yield coordinator


async def _all(one: WorkerProcess, number: int, length: int, count: int) -> None:
    prompt = [32 + (number * 7 + index) % 95 for index in range(length)]
    answers = [answer async for answer in one.stub.Generate(leg(prompt, count, number=number), timeout=60)]
    assert tokens(answers) == oracle(prompt, count), number
    assert answers[-1].finished.report.decode_tokens == count - 1


async def test_50_concurrent_requests_are_right_and_leave_nothing(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address) as one:
        assert await one.serving(), one.log
        await asyncio.gather(*(_all(one, number, 1 + number * 9, 1 + number % 20) for number in range(50)))
        await one.idle()
        calls = [one.stub.Generate(leg([65] * 40, 4000, number=100 + number)) for number in range(8)]
        for call in calls:
            await call.read()
            call.cancel()
        await one.idle()
        await coordinator.until(lambda: coordinator.said("load")[-1].used_blocks == 0)
        modules = _modules(one.process.pid)
        assert not [name for name in ("torch", "nixl", "_bindings", "safetensors") if name in modules], modules
        assert await one.stop() == 0
        assert "draining" in {message.WhichOneof("body") for message in coordinator.streams[0]}


def _modules(pid: int) -> str:
    """Files a process has mapped: extension modules show up here, whatever their Python name is."""
    maps = Path(f"/proc/{pid}/maps").read_text()
    return "\n".join(
        sorted({line.split()[-1] for line in maps.splitlines() if ".so" in line and "site-packages" in line})
    )


async def test_sigterm_lets_running_requests_finish(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, SLOW) as one:
        assert await one.serving(), one.log
        running = asyncio.create_task(_all(one, 1, 50, 60))
        while not (await one.load()).running_requests:
            await asyncio.sleep(0.01)
        one.process.send_signal(signal.SIGTERM)
        await coordinator.until(lambda: bool(coordinator.said("draining")))
        assert not await one.serving(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await one.stub.Generate(leg([65], 1, number=2)).read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await running
        assert await one.exit_code() == 0


async def test_a_drain_is_bounded_and_what_is_left_fails_typed(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, "engine.mock.decode_us=50000", "worker.drain_s=0.3") as one:
        assert await one.serving(), one.log
        call = aiter(one.stub.Generate(leg([65] * 5, 4000)))
        await anext(call)
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in call]
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.detail is not None
        assert error.detail.key.request_id == BASE
        assert await one.exit_code() == 0
        assert "worker.drain_s" in one.log


async def test_a_killed_engine_is_worker_lost_and_exit_4(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, SLOW, "worker.instance_id=w-0") as one:
        assert await one.serving(), one.log
        call = aiter(one.stub.Generate(leg([65] * 5, 4000)))
        await anext(call)
        one.engine.kill()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [answer async for answer in call]
        error = from_rpc_error(caught.value)
        assert error.code is grpc.StatusCode.UNAVAILABLE
        assert error.detail is not None
        assert (error.detail.instance_id, error.detail.phase) == ("w-0", "decode")
        assert not await one.serving(0.2)
        assert await one.exit_code() == 4
        assert "SIGKILL" in one.log.splitlines()[-1]
        await coordinator.until(lambda: coordinator.open_streams == 0)


async def test_a_killed_hub_takes_its_engine_with_it(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, "worker.instance_id=w-0") as one:
        assert await one.serving(), one.log
        engine = one.engine
        one.process.kill()
        await one.exit_code()
        psutil.wait_procs([engine], timeout=20)
        assert not engine.is_running()
        # Its successor proves that, and knows whom it succeeds.
        first = coordinator.said("hello")[0].instance.incarnation
        async with worker(tmp_path, coordinator.address, "worker.instance_id=w-0", "worker.role=context") as two:
            assert await two.serving(), two.log
            from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

            from isthmus_core.rpc import open_channel

            async with open_channel(two.address) as channel:
                stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
                info = await stub.GetInstanceInfo(kv_transfer_service_pb2.GetInstanceInfoRequest())
            assert list(info.instance.exited_incarnations) == [first]
            assert await two.stop() == 0


async def test_two_workers_can_not_have_one_name(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, "worker.instance_id=w-0") as one:
        assert await one.serving(), one.log
        async with worker(tmp_path, coordinator.address, "worker.instance_id=w-0") as two:
            assert await two.exit_code() == 3
            assert f"process {one.process.pid}" in two.log
        assert await one.stop() == 0
    assert len(coordinator.streams) == 1


async def test_a_taken_port_is_named_before_an_engine_is_spawned(tmp_path: Path, coordinator: FakeCoordinator):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        async with worker(tmp_path, coordinator.address, port=port) as one:
            assert await one.exit_code() == 3
            assert f"worker.listen = 127.0.0.1:{port}" in one.log
            assert "model loaded" not in one.log
    assert not (tmp_path / "state").exists()


async def test_an_absent_coordinator_ends_the_start_with_the_reason(tmp_path: Path):
    absent = f"127.0.0.1:{free_port()}"
    async with worker(tmp_path, absent, "worker.start_timeout_s=1") as one:
        assert not await one.serving(0.1)
        assert await one.exit_code() == 3
        assert absent in one.log.splitlines()[-1]
        assert "1 s" in one.log.splitlines()[-1]


async def test_sigterm_during_the_start_leaves_nothing(tmp_path: Path):
    async with worker(tmp_path, f"127.0.0.1:{free_port()}") as one:
        while "model loaded" not in one.log:
            await asyncio.sleep(0.02)
        engine = one.engine
        assert await one.stop() == 0
        assert not engine.is_running()


async def test_a_start_that_the_engine_refuses_says_why(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, "engine.kind=torch", f"model.path={tmp_path / 'absent'}") as one:
        assert await one.exit_code() in (2, 3)
        assert str(tmp_path / "absent") in one.log.splitlines()[-1]
    assert not coordinator.streams


async def test_health_follows_the_membership(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address, "worker.instance_id=w-0") as one:
        assert await one.serving(), one.log
        coordinator.mute = True
        coordinator.send(None)
        while await one.serving(0.05):
            await asyncio.sleep(0.02)
        await _all(one, 1, 10, 3)  # what finds its way here is served all the same
        coordinator.mute = False
        coordinator.send(None)
        assert await one.serving()
        coordinator.send(grpc.StatusCode.ALREADY_EXISTS)
        assert await one.exit_code() == 4
        assert "another incarnation" in one.log.splitlines()[-1]


async def test_requests_that_do_not_fit_the_model(tmp_path: Path, coordinator: FakeCoordinator):
    too_much = [([65] * 9000, 1, "prompt"), ([999], 1, "prompt"), ([65] * 8000, 1000, "sampling.max_tokens")]
    async with worker(tmp_path, coordinator.address) as one:
        assert await one.serving(), one.log
        for prompt, max_tokens, field in too_much:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.stub.Generate(leg(prompt, max_tokens)).read()
            error = from_rpc_error(caught.value)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert error.detail is not None
            assert error.detail.field == field
        await one.idle()
        assert await one.stop() == 0


async def test_answers_side_by_side_and_a_prompt_that_was_here_before(tmp_path: Path, coordinator: FakeCoordinator):
    async with worker(tmp_path, coordinator.address) as one:
        assert await one.serving(), one.log
        prompt = [32 + index * 5 % 95 for index in range(100)]
        sampling = Sampling(20, temperature=1.0, seed=7, n=4, logprobs=1)
        cached: list[int] = []
        for number, salt in enumerate((b"", b"", b"tenant")):
            request = leg(prompt, 20, number=number)
            request.sampling.CopyFrom(sampling_to_pb(sampling))
            request.cache_salt = salt
            answers = [answer async for answer in one.stub.Generate(request, timeout=60)]
            chunks = [chunk_from_pb(answer.tokens) for answer in answers[:-1]]
            for sample in range(4):
                own = [chunk for chunk in chunks if chunk.sample == sample]
                expected = oracle(prompt, 20, sampling=sampling, sample=sample)
                assert [token for chunk in own for token in chunk.ids] == expected
                assert [chunk.reason for chunk in own] == [None] * 19 + [FinishReason.LENGTH]
                assert all(len(chunk.logprobs) == 1 for chunk in own)
            assert answers[-1].finished.report.decode_tokens == 4 * 19
            cached.append(answers[-1].finished.report.cached_tokens)
        assert cached == [0, 96, 0]
        call = one.stub.Generate(request)
        await call.read()
        call.cancel()
        await one.idle()
        assert await one.stop() == 0


async def test_a_full_queue_says_when_to_come_back(tmp_path: Path, coordinator: FakeCoordinator):
    limits = ("engine.max_running=1", "engine.max_waiting=2")
    async with worker(tmp_path, coordinator.address, SLOW, *limits) as one:
        assert await one.serving(), one.log

        async def ask(number: int) -> IsthmusError | None:
            try:
                await _all(one, number, 5, 10)
            except grpc.aio.AioRpcError as caught:
                return from_rpc_error(caught)
            return None

        errors = [error for error in await asyncio.gather(*map(ask, range(20))) if error is not None]
        assert 0 < len(errors) < 20
        for error in errors:
            assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            wait_s = retry_after_s(error)
            assert wait_s is not None
            assert 1.0 <= wait_s <= 60.0
        await one.idle()
