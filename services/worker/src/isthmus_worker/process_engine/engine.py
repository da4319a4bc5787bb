"""`ProcessEngine`: seam 1 over the child processes of an instance, one for each rank."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable

from isthmus_core.errors import ConfigError, NoCapacity, StartError
from isthmus_core.framing import AsyncFrameSocket, FrameError
from isthmus_core.ids import check_request_id
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineDescription, EngineLoad, EngineRequest, KvEvent, LegReport
from isthmus_worker.process_engine.batch import BatchedSender
from isthmus_worker.process_engine.cached_keys import CachedKeys
from isthmus_worker.process_engine.child import ExitReport
from isthmus_worker.process_engine.launch import EngineLaunch
from isthmus_worker.process_engine.legs import LegStream, OpenLegs
from isthmus_worker.process_engine.ranks import RankProcesses
from isthmus_worker.wire.engine_frames import (
    Abort,
    EngineCommand,
    EngineEvent,
    LegEnded,
    LegReleased,
    LegTokens,
    Stop,
    commands_to_bytes,
    events_from_bytes,
)
from kvtransfer.errors import WireError
from kvtransfer.ports import HubToRank, HubToScheduler, RankReady, RankToHub, SchedulerToHub
from kvtransfer.rank_info import RankInfo
from kvtransfer.wire import rank_input_to_bytes, rank_output_from_bytes

logger = logging.getLogger(__name__)

# A child that was asked to leave flushes and leaves at once; one that does not is stuck in a kernel or a driver.
_STOP_S = 5.0
# After the exit, what the child had written before is still read; a grandchild may keep the sockets open.
_DRAIN_SOCKETS_S = 1.0


class ProcessEngine:
    """An engine in child processes. Implements `isthmus_worker.engine.Engine`; one event loop owns it.

    `on_transfer` and `on_rank` get what the scheduler and the rank roles say to the transfer hub, `on_load` every new
    load, `on_end` the report of every leg that is over, before its consumer hears of it. `exited` completes with the
    exit report that says why when the processes have ended, asked for or not; by then every stream has ended and
    everything that they said has been delivered.
    """

    def __init__(
        self,
        launch: EngineLaunch,
        instance_id: str,
        *,
        on_transfer: Callable[[SchedulerToHub], None] | None = None,
        on_rank: Callable[[int, RankToHub], None] | None = None,
        on_load: Callable[[EngineLoad], None] | None = None,
        on_end: Callable[[RequestKey, LegReport], None] | None = None,
    ) -> None:
        self._launch = launch
        self._instance_id = instance_id
        self._on_transfer, self._on_rank, self._on_load, self._on_end = on_transfer, on_rank, on_load, on_end
        self._legs = OpenLegs(instance_id, self.abort)
        self._load = EngineLoad()
        self._cached = CachedKeys()
        self._accepting = False
        self._refusal = "the engine is starting"
        self._ranks: RankProcesses | None = None
        self._commands: BatchedSender[EngineCommand] | None = None
        self._to_rank: list[BatchedSender[HubToRank]] = []
        self._description: EngineDescription | None = None
        self._started = asyncio.Event()
        self.exited: asyncio.Future[ExitReport] = asyncio.get_running_loop().create_future()
        self._supervisor: asyncio.Task[None] | None = None
        self._rank_infos: dict[int, RankInfo] = {}

    @property
    def rank_infos(self) -> tuple[RankInfo, ...]:
        """What the peers must know of each rank, in flat order; complete once the engine has started."""
        return tuple(info for _, info in sorted(self._rank_infos.items()))

    @property
    def ranks(self) -> int:
        """Processes of the instance."""
        return self._launch.ranks

    @property
    def open_requests(self) -> int:
        """Keys of which the engine holds something."""
        return len(self._legs)

    async def start(self) -> EngineDescription:
        """Spawn the processes and wait until they can work.

        Raises ConfigError or StartError with the reason; the processes are gone then.
        """
        ranks = self._ranks = RankProcesses.spawn(self._launch)
        try:
            scheduler = await AsyncFrameSocket.open(ranks.scheduler)
            self._commands = BatchedSender(scheduler, commands_to_bytes)
            sockets, readers = [scheduler], [asyncio.create_task(self._read_scheduler(scheduler))]
            for rank, transfer in enumerate(ranks.transfer):
                sock = await AsyncFrameSocket.open(transfer)
                self._to_rank.append(BatchedSender(sock, rank_input_to_bytes))
                sockets.append(sock)
                readers.append(asyncio.create_task(self._read_rank(rank, sock)))
            self._supervisor = asyncio.create_task(self._supervise(ranks, readers, sockets))
            description = await self._wait_started()
        except BaseException:
            await self._kill()
            raise
        self._accepting = True
        return description

    async def _wait_started(self) -> EngineDescription:
        timeout_s = self._launch.start_timeout_s
        started = asyncio.create_task(self._started.wait())
        try:
            await asyncio.wait([started, self.exited], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            started.cancel()
        if self.exited.done():
            report = self.exited.result()
            kind = ConfigError if report.code == ConfigError.exit_code else StartError
            explained = report.last_line and report.code in (ConfigError.exit_code, StartError.exit_code)
            raise kind(report.last_line if explained else str(report))
        if self._description is None or not self._started.is_set():
            raise StartError(
                f"the engine was not ready after {timeout_s:g} s (worker.engine_start_timeout_s); "
                "see its output above, or give it more time"
            )
        return self._description

    def submit(self, request: EngineRequest) -> LegStream:
        """Take a leg. Raises InvalidRequest, DuplicateRequest, NoCapacity at once; what only the engine can judge
        raises from the stream."""
        check_request_id(request.key.request_id, "key.request_id")
        if not self._accepting:
            raise NoCapacity(f"instance {self._instance_id} takes no requests: {self._refusal}")
        stream = self._legs.open(request)
        self._tell(request)
        return stream

    def abort(self, key: RequestKey) -> None:
        """Cancel a leg or withdraw the pages it holds; keys that are not live are ignored."""
        if self._legs.mark_aborted(key):
            self._tell(Abort(key))

    async def drain(self, deadline_s: float) -> None:
        """Stop admission, wait until nothing is held. Raises TimeoutError after `deadline_s` seconds."""
        self._accepting, self._refusal = False, "it is draining"
        async with asyncio.timeout(deadline_s):
            await self._legs.wait_empty()

    async def idle(self) -> None:
        """Returns when nothing is held; new legs are taken meanwhile."""
        await self._legs.wait_empty()

    def load(self) -> EngineLoad:
        """As last reported."""
        return self._load

    def kv_events(self) -> AsyncIterator[KvEvent]:
        """Begins with everything that is reusable now (`reset`); ends when the engine process does."""
        return self._cached.follow()

    def deliver(self, message: HubToScheduler) -> None:
        """Pass an outcome of the transfer hub to the scheduler role. One for a process that is gone is dropped: its
        pages are gone too."""
        self._tell(message)

    def send_to_rank(self, rank: int, message: HubToRank) -> None:
        """The way of the transfer hub to a rank role. Raises ConnectionError when it is gone."""
        if rank >= len(self._to_rank):
            raise ConnectionError(f"rank {rank} has no rank role")
        self._to_rank[rank].send(message)

    async def stop(self) -> None:
        """End the processes and reap them; running requests fail with WorkerLost. Idempotent."""
        self._accepting, self._refusal = False, "it has stopped"
        ranks = self._ranks
        if ranks is None:
            return
        if not self.exited.done():
            self._tell(Stop())
            if await ranks.wait(_STOP_S) is None:
                logger.warning("engine processes %s did not leave within %g s and are killed", ranks.pids, _STOP_S)
        await self._kill()

    def kill(self, rank: int, reason: str) -> None:
        """SIGKILL a rank: somebody can not wait for what it may still be doing. The others end with it, `exited`
        follows."""
        if self._ranks is not None and not self.exited.done():
            logger.error("engine process %d (rank %d) is killed: %s", self._ranks.pids[rank], rank, reason)
            self._ranks.signal(signal.SIGKILL, rank)

    def _tell(self, command: EngineCommand) -> None:
        if self._commands is None:
            return
        try:
            self._commands.send(command)
        except ConnectionError:
            # The process is leaving: its exit report, which is on its way, ends everything it was working on.
            logger.debug("%s comes after the end of the engine process", type(command).__name__)

    async def _kill(self) -> None:
        ranks = self._ranks
        if ranks is None:
            return
        ranks.signal(signal.SIGKILL)
        await asyncio.shield(ranks.exited)
        if self._supervisor is not None:
            await self._supervisor
        else:
            ranks.close()

    async def _supervise(
        self, ranks: RankProcesses, readers: list[asyncio.Task[None]], sockets: list[AsyncFrameSocket]
    ) -> None:
        """To the end of the processes: first what they said, then what their end means."""
        await asyncio.wait([ranks.exited, *readers], return_when=asyncio.FIRST_COMPLETED)
        for task in readers:
            if task.done() and (error := task.exception()) is not None:
                self._broken(f"what it said could not be applied: {error!r}")
        if await ranks.wait(_STOP_S) is None:
            self._broken("it closed a socket and did not leave")
        report = await asyncio.shield(ranks.exited)
        _, unread = await asyncio.wait(readers, timeout=_DRAIN_SOCKETS_S)
        for task in unread:
            task.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        self._accepting, self._refusal = False, "its engine process is gone"
        for sender in (self._commands, *self._to_rank):
            if sender is not None:
                sender.close()
        for sock in sockets:
            sock.close()
        await self._last_words()
        self._legs.lose_all()
        self._cached.close()
        self._load = EngineLoad(total_blocks=self._load.total_blocks)
        self.exited.set_result(report)

    async def _last_words(self) -> None:
        """The processes have exited: whoever adds others to them ends those before anybody is told."""

    async def _read_scheduler(self, sock: AsyncFrameSocket) -> None:
        try:
            while (frame := await sock.recv()) is not None:
                for event in events_from_bytes(frame):
                    self._apply(event)
        except FrameError as error:
            self._broken(f"its scheduler socket: {error}")

    async def _read_rank(self, rank: int, sock: AsyncFrameSocket) -> None:
        try:
            while (frame := await sock.recv()) is not None:
                for event in rank_output_from_bytes(frame):
                    if isinstance(event, RankReady):
                        self._rank_infos[rank] = event.info
                        self._note_started()
                    elif self._on_rank is not None:
                        self._on_rank(rank, event)
        except (FrameError, WireError) as error:
            self._broken(f"its rank socket: {error}", rank)

    def _note_started(self) -> None:
        if self._description is not None and (len(self._rank_infos) == self.ranks or not self._launch.with_rank):
            self._started.set()

    def _broken(self, what: str, rank: int = 0) -> None:
        """A child can not be understood any more: only its end tells that its writes are over."""
        ranks = self._ranks
        if ranks is not None and not ranks.exited.done():
            logger.error("the engine process %d is killed: %s", ranks.pids[rank], what)
            ranks.signal(signal.SIGKILL, rank)

    def _apply(self, event: EngineEvent) -> None:
        match event:
            case LegTokens() | LegReleased():
                self._legs.apply(event)
            case LegEnded():
                if self._on_end is not None:
                    self._on_end(event.key, event.report)
                self._legs.apply(event)
            case EngineLoad():
                self._load = event
                if self._on_load is not None:
                    self._on_load(event)
            case EngineDescription():
                self._load = EngineLoad(total_blocks=event.total_blocks)
                self._description = event
                self._note_started()
            case KvEvent():
                self._cached.apply(event)
            case _:
                if self._on_transfer is None:
                    raise FrameError(f"a {type(event).__name__} of an instance that hands nothing off")
                self._on_transfer(event)
