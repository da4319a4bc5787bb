"""`python -m isthmus_worker` with the mock engine, for tests of the hub as a process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from isthmus.v1 import (
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)

from isthmus_core.process import free_port
from isthmus_core.rpc import open_channel, wait_serving

BASE = 1 << 40
CONTEXT, GENERATION, BOTH = 1, 2, 3


class WorkerProcess:
    """One worker; `log` is its stderr so far."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, log_path: Path, host: str = "127.0.0.1") -> None:
        self.process = process
        self.port = port
        self.address = f"{host}:{port}"
        self._log_path = log_path
        self._channel = open_channel(self.address)
        self.stub = worker_service_pb2_grpc.WorkerServiceStub(self._channel)
        self._transfer = kv_transfer_service_pb2_grpc.KvTransferServiceStub(self._channel)

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    @property
    def engine(self) -> psutil.Process:
        """The engine process."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    async def serving(self, timeout_s: float = 40.0) -> bool:
        return await wait_serving(self.address, timeout_s)

    async def exit_code(self) -> int:
        return await self.process.wait()

    async def stop(self) -> int:
        """SIGTERM, then the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()

    async def close(self) -> None:
        await self._channel.close()
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()

    async def load(self) -> worker_service_pb2.InstanceLoad:
        return (await self.stub.GetStatus(worker_service_pb2.GetStatusRequest())).load

    async def sessions(self) -> kv_transfer_service_pb2.ListSessionsResponse:
        return await self._transfer.ListSessions(kv_transfer_service_pb2.ListSessionsRequest())

    async def idle(self) -> None:
        """Wait until nothing is held; the test's own timeout is the bound."""
        fields = ("running_requests", "waiting_requests", "held_handoffs", "used_blocks", "in_doubt_blocks")
        load = await self.load()
        while any(getattr(load, field) for field in fields):
            await asyncio.sleep(0.02)
            load = await self.load()


@asynccontextmanager
async def worker(
    folder: Path,
    coordinator: str,
    *overrides: str,
    port: int | None = None,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    **environment: str,
) -> AsyncGenerator[WorkerProcess, None]:
    """A worker that is being started: mock engine, 512 blocks, state and log in `folder`. Killed at the end. `host`:
    where the test reaches it; `prefix`: of the command."""
    port = port or free_port()
    settings = [
        f"worker.coordinator={coordinator}",
        f"worker.listen={'127.0.0.1' if host == '127.0.0.1' else '0.0.0.0'}:{port}",
        f"worker.advertise={host}:{port}",
        f"worker.state_dir={folder / 'state'}",
        "worker.start_timeout_s=30",
        "engine.kind=mock",
        "engine.num_blocks=512",
        "model.name=mock",
        "transfer.backend=nixl",
        *overrides,
    ]
    # Through the launcher of local clusters: a worker never outlives the test run, however that ends.
    command = [*prefix, sys.executable, "-m", "isthmus_client.child", str(os.getpid()), "isthmus_worker"]
    for setting in settings:
        command += ["--set", setting]
    log_path = folder / f"{port}.log"
    with log_path.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stderr=log, env={**os.environ, **environment}
        )
    one = WorkerProcess(process, port, log_path, host)
    try:
        yield one
    except BaseException:
        print(one.log, file=sys.stderr)
        raise
    finally:
        await one.close()


def leg(
    prompt: Sequence[int], max_tokens: int, *, kind: int = BOTH, number: int = 0, attempt: int = 0, params: Any = None
) -> worker_service_pb2.WorkerServiceGenerateRequest:
    """A leg of request BASE + number."""
    request = worker_service_pb2.WorkerServiceGenerateRequest(
        request_type=worker_service_pb2.RequestType.Name(kind),  # type: ignore[arg-type]
        context_phase=params,
    )
    request.key.request_id, request.key.attempt = BASE + number, attempt
    request.prompt.le_uint32 = array("I", prompt).tobytes()
    request.sampling.max_tokens = max_tokens
    return request


def tokens(answers: Sequence[worker_service_pb2.WorkerServiceGenerateResponse]) -> list[int]:
    """All tokens of a leg's answers."""
    return [token for answer in answers for token in array("I", answer.tokens.tokens.le_uint32)]
