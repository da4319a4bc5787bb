"""The hub's end: takes the connections of an engine's processes and carries messages."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus_core.framing import AsyncFrameSocket, FrameError
from kvtransfer.errors import KVTransferError, WireError
from kvtransfer.local.client import SOCKET_BUFFER
from kvtransfer.local.messages import LocalHello, LocalScheduler, LocalWelcome
from kvtransfer.local.process_watch import ProcessWatch, peer_process
from kvtransfer.ports import RankReady
from kvtransfer.wire import rank_input_to_bytes, rank_output_from_bytes
from kvtransfer.wire.local import (
    local_hello_from_bytes,
    local_input_to_bytes,
    local_output_from_bytes,
    local_refusal_to_bytes,
    local_welcome_to_bytes,
)

if TYPE_CHECKING:
    from kvtransfer.ports import HubToRank, HubToScheduler, RankToHub, SchedulerToHub
    from kvtransfer.rank_info import RankInfo

log = logging.getLogger(__name__)

_HELLO_S = 10.0
_LAST_WORDS_S = 1.0


@dataclass(slots=True)
class _Engine:
    """What has been said so far."""

    world_size: int = 0
    facts: LocalScheduler | None = None
    infos: dict[int, RankInfo] = field(default_factory=dict[int, "RankInfo"])

    @property
    def complete(self) -> bool:
        return self.facts is not None and len(self.infos) == self.world_size


class _RankPort:
    def __init__(self, links: dict[int, AsyncFrameSocket], rank: int) -> None:
        self._links, self._rank = links, rank

    def send(self, message: HubToRank) -> None:
        link = self._links.get(self._rank)
        if link is None:
            raise ConnectionError(f"rank {self._rank} is not connected")
        link.send(rank_input_to_bytes((message,)))


class LocalServer:
    """One engine. `on_transfer` and `on_rank` get what its scheduler and its ranks say; `on_exit(rank, reason)` is
    called for every rank whose process has exited. Everything is called on the event loop.

    `lock_fd`: see `client.Connection`. Nothing that a process says before `ready` has returned is lost or early: the
    hand-off has not begun.
    """

    def __init__(
        self,
        welcome: LocalWelcome,
        *,
        on_transfer: Callable[[SchedulerToHub], None],
        on_rank: Callable[[int, RankToHub], None],
        on_exit: Callable[[int, str], None],
        lock_fd: int | None = None,
    ) -> None:
        self._welcome, self._lock_fd = welcome, lock_fd
        self._on_transfer, self._on_rank, self._on_exit = on_transfer, on_rank, on_exit
        self._engine = _Engine()
        self._complete = asyncio.Event()
        self._scheduler: AsyncFrameSocket | None = None
        self._ranks: dict[int, AsyncFrameSocket] = {}
        self._rank_of: dict[int, list[int]] = {}
        self._serving: dict[int, set[asyncio.Task[None]]] = {}
        self._watch = ProcessWatch(self._process_exited)
        self._tasks: set[asyncio.Task[None]] = set()
        self._folder: Path | None = None
        self._listener: socket.socket | None = None
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    # --- life

    async def start(self) -> str:
        """Listens; returns the path that the engine's processes must be told."""
        self._folder = Path(tempfile.mkdtemp(prefix="isthmus-"))  # nobody else may enter it
        path = self._folder / "hub.sock"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        return str(path)

    async def ready(self, timeout_s: float) -> tuple[LocalScheduler, tuple[RankInfo, ...]]:
        """Waits until the scheduler and every rank have announced themselves. Raises KVTransferError naming what is
        missing after `timeout_s` seconds, or why the engine is gone."""
        waiting = asyncio.create_task(self._complete.wait())
        try:
            await asyncio.wait((waiting, self.lost), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        engine = self._engine
        if self.lost.done():
            raise KVTransferError(self.lost.result())
        if engine.facts is None or not engine.complete:
            there = sorted(engine.infos)
            raise KVTransferError(
                f"after {timeout_s:g} s the scheduler is {'there' if engine.facts else 'missing'} and of "
                f"{engine.world_size or 'unknown many'} ranks {there or 'none'} announced themselves"
            )
        return engine.facts, tuple(engine.infos[rank] for rank in sorted(engine.infos))

    @property
    def processes(self) -> tuple[int, ...]:
        """Ids of the processes that have connected and live."""
        return self._watch.living

    def kill(self, reason: str) -> None:
        """SIGKILL every process of the engine. `on_exit` follows."""
        if self._watch.living:
            log.error("the engine's processes %s are killed: %s", self._watch.living, reason)
            self._watch.kill()

    async def wait_exited(self, timeout_s: float) -> bool:
        """True when every process that has connected has exited within `timeout_s` seconds."""
        return await self._watch.wait_none(timeout_s)

    async def close(self) -> None:
        """Ends connections and tasks; processes that still live see the end of theirs."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in (self._scheduler, *self._ranks.values()):
            if link is not None:
                link.close()
        self._watch.close()
        if self._listener is not None:
            self._listener.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # --- to the engine

    def deliver(self, message: HubToScheduler) -> None:
        """To the scheduler role. For a process that is gone it is dropped: the pages are gone too."""
        if self._scheduler is None:
            return
        try:
            self._scheduler.send(local_input_to_bytes((message,)))
        except ConnectionError:
            log.debug("%s comes after the end of the engine's scheduler", type(message).__name__)

    def rank_port(self, rank: int) -> _RankPort:
        """The hub's way to a rank role, as `kvtransfer.ports.RankPort`."""
        return _RankPort(self._ranks, rank)

    # --- from the engine

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(listener)
            pid, uid = peer_process(sock)
            if uid != os.getuid():
                log.warning("process %d of user %d is not let in", pid, uid)
                sock.close()
                continue
            try:
                self._watch.add(pid)
            except ProcessLookupError:
                sock.close()
                continue
            self._serving.setdefault(pid, set()).add(self._spawn(self._serve(sock, pid)))

    async def _serve(self, sock: socket.socket, pid: int) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER)
        socket.send_fds(sock, [b"\0"], [] if self._lock_fd is None else [self._lock_fd])
        link = await AsyncFrameSocket.open(sock)
        try:
            async with asyncio.timeout(_HELLO_S):
                frame = await link.recv()
            if frame is None:
                return
            hello = local_hello_from_bytes(frame)
            if problem := self._problem(hello):
                raise WireError("local_hello", problem)
        except (FrameError, WireError, TimeoutError) as error:
            log.warning("process %d is not let in: %s", pid, error or "it did not introduce itself")
            link.send(local_refusal_to_bytes(str(error)))
            link.close()
            return
        link.send(local_welcome_to_bytes(self._welcome))
        self._engine.world_size = hello.world_size
        try:
            if isinstance(hello.who, int):
                await self._serve_rank(link, hello.who, pid)
            else:
                await self._serve_scheduler(link, hello.who)
        except (FrameError, WireError, KVTransferError) as error:
            # What it says can not be applied any more: only its end tells that its writes are over.
            self.kill(f"process {pid} can not be understood: {error}")

    def _problem(self, hello: LocalHello) -> str:
        engine = self._engine
        if engine.world_size not in (0, hello.world_size):
            return f"{hello.world_size} ranks, other processes said {engine.world_size}"
        if isinstance(hello.who, int):
            return f"rank {hello.who} is here already" if hello.who in self._ranks else ""
        return "a scheduler is here already" if self._scheduler is not None else ""

    async def _serve_scheduler(self, link: AsyncFrameSocket, facts: LocalScheduler) -> None:
        self._scheduler, self._engine.facts = link, facts
        self._note_complete()
        while (frame := await link.recv()) is not None:
            for message in local_output_from_bytes(frame):
                self._on_transfer(message)

    async def _serve_rank(self, link: AsyncFrameSocket, rank: int, pid: int) -> None:
        self._ranks[rank] = link
        self._rank_of.setdefault(pid, []).append(rank)
        while (frame := await link.recv()) is not None:
            for event in rank_output_from_bytes(frame):
                if isinstance(event, RankReady):
                    self._engine.infos[rank] = event.info
                    self._note_complete()
                else:
                    self._on_rank(rank, event)

    def _note_complete(self) -> None:
        if self._engine.complete:
            self._complete.set()

    def _process_exited(self, pid: int) -> None:
        self._spawn(self._report_exit(pid))

    async def _report_exit(self, pid: int) -> None:
        """First what it said, then what its end means."""
        reason = f"process {pid} of the engine has exited"
        reading = self._serving.pop(pid, None)
        if reading:
            # A child of it may keep the sockets open.
            await asyncio.wait(reading, timeout=_LAST_WORDS_S)
        for rank in self._rank_of.pop(pid, ()):
            self._on_exit(rank, reason)
        if not self.lost.done():
            self.lost.set_result(reason)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            message = "a task of the local server failed"
            task.get_loop().call_exception_handler({"message": message, "exception": error, "task": task})
