"""All processes of one instance: started together, ended together, one report that says why."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError
from isthmus_worker.parallel.links import RANK_LOST
from isthmus_worker.process_engine.child import EngineChild, ExitReport, socketpair

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_worker.process_engine.launch import EngineLaunch

logger = logging.getLogger(__name__)

# A rank that ends because another one did may be reaped before it.
_REASON_S = 2.0
# After an orderly end of one of them the others leave by themselves.
_LEAVE_S = 3.0


class RankProcesses:
    """`transfer[r]`: the hub's end of the socket to the rank role of rank r; empty when they have none.

    As soon as one process has ended the others are ended too: nothing they compute would be right. `exited` completes
    when all are gone, with the report of the one that took them down.
    """

    def __init__(self, children: Sequence[EngineChild]) -> None:
        self._children = tuple(children)
        self._reports: list[ExitReport] = []
        self.transfer = [child.transfer for child in children if child.transfer is not None]
        self.exited: asyncio.Future[ExitReport] = asyncio.get_running_loop().create_future()
        for child in children:
            child.exited.add_done_callback(lambda report: self._reports.append(report.result()))
        self._task = asyncio.create_task(self._end_together(), name="engine-ranks")

    @property
    def scheduler(self) -> socket.socket:
        """The hub's end of the socket to the scheduler."""
        scheduler = self._children[0].scheduler
        if scheduler is None:
            raise InternalError("the first rank has no scheduler")
        return scheduler

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes, by rank."""
        return tuple(child.pid for child in self._children)

    @classmethod
    def spawn(cls, launch: EngineLaunch) -> RankProcesses:
        """Starts all of them at once. Call it on the main thread: a child dies with the thread that made it. Raises
        StartError; none is left then."""
        children: list[EngineChild] = []
        with contextlib.ExitStack() as handed_over:
            ours: list[socket.socket] = []
            theirs: list[socket.socket] = []
            for _ in range(1, launch.ranks):
                for end, ends in zip(socketpair(), (ours, theirs), strict=True):
                    ends.append(handed_over.enter_context(end))
            try:
                for rank in range(launch.ranks):
                    children.append(EngineChild.spawn(launch, rank, ours if rank == 0 else [theirs[rank - 1]]))
            except BaseException:
                for child in children:
                    child.signal(signal.SIGKILL)
                    child.close()
                raise
        return cls(children)

    def signal(self, number: int, rank: int | None = None) -> None:
        """To one rank, or to all."""
        for child in self._children if rank is None else (self._children[rank],):
            child.signal(number)

    async def wait(self, timeout_s: float) -> ExitReport | None:
        """The report; None when some process still runs after `timeout_s` seconds."""
        done, _ = await asyncio.wait([self.exited], timeout=timeout_s)
        return self.exited.result() if done else None

    def close(self) -> None:
        """The hub's ends, where nobody else has taken them."""
        for child in self._children:
            child.close()

    async def _end_together(self) -> None:
        running = [child.exited for child in self._children]
        _, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        deadline = asyncio.get_running_loop().time() + (
            _LEAVE_S if all(one.code == 0 for one in self._reports) else _REASON_S
        )
        while pending and all(one.code in (0, RANK_LOST) for one in self._reports):
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                break
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        report = self._reason()
        if pending:
            if report.code:
                logger.error("%s; the other %d ranks are ended", report, len(pending))
            self.signal(signal.SIGKILL)
            await asyncio.wait(pending)
        self.exited.set_result(report)

    def _reason(self) -> ExitReport:
        """Of the first one that has a reason of its own."""
        own = [one for one in self._reports if one.code not in (0, RANK_LOST)]
        lost = [one for one in self._reports if one.code == RANK_LOST]
        return (own or lost or self._reports)[0]
