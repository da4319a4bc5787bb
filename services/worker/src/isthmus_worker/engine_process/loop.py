"""The executor: commands in, one step of the model, events out, until the hub says stop."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from isthmus_core.errors import DuplicateRequest, InternalError, IsthmusError
from isthmus_worker.engine import EngineLoad, EngineRequest, LegReport
from isthmus_worker.engine_process.inbox import HubGone
from isthmus_worker.runner import NonFiniteLogits
from isthmus_worker.scheduler import RequestFinished, RequestReleased
from isthmus_worker.wire.engine_frames import Abort, Stop
from kvtransfer.ports import BindFailed, Bound, FirstTokensArrived, ReceiveOutcome, SendOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_worker.engine_process.inbox import Inbox
    from isthmus_worker.engine_process.outbox import Outbox
    from isthmus_worker.runner import BatchRow, ModelRunner
    from isthmus_worker.scheduler.front import Front, JointPlan
    from isthmus_worker.wire.engine_frames import EngineCommand

logger = logging.getLogger(__name__)

# Load is told at most this often while there is work, and at once when it ends.
LOAD_INTERVAL_S = 0.2


class EngineLoop:
    """Runs on the thread that owns the model. Sleeps in the inbox when there is nothing to compute.

    `run` returns when the hub says stop or is gone. Whatever it raises ends the process: IsthmusError and FrameError
    are bugs of one of the two sides, everything else comes from the model. `speaks_early`: what was said during the
    planning of a step is sent before it is computed.
    """

    def __init__(
        self,
        scheduler: Front,
        runner: ModelRunner,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        *,
        speaks_early: bool = False,
    ) -> None:
        self._scheduler, self._runner, self._inbox, self._outbox = scheduler, runner, inbox, outbox
        self._clock, self._speaks_early = clock, speaks_early
        self._told: EngineLoad | None = None
        self._told_at = float("-inf")
        self._had_work = False

    def run(self) -> None:
        """Until the end."""
        wait_s: float | None = 0.0
        while True:
            heard = self._inbox.take(wait_s)
            for command in heard:
                if isinstance(command, HubGone | Stop):
                    logger.info("leaving: %s", "the hub is gone" if isinstance(command, HubGone) else "stopped")
                    return
                self._handle(command)
            self._had_work |= self._scheduler.live > 0
            self._scheduler.poll()
            plan = self._scheduler.plan(self._clock())
            plan.make_copies(self._runner)
            rows = plan.rows
            try:
                if rows and self._speaks_early:
                    # What the step will have computed is on offer already.
                    self._outbox.flush()
                if rows:
                    self._execute(plan, rows)
                wait_s = self._report_load(busy=bool(rows))
                self._outbox.flush()
            except ConnectionError:
                logger.info("leaving: the hub is gone")
                return

    def _handle(self, command: EngineCommand) -> None:
        match command:
            case EngineRequest():
                self._submit(command)
            case Abort(key):
                self._scheduler.abort(key)
            case SendOutcome() | ReceiveOutcome() | Bound() | FirstTokensArrived() | BindFailed():
                self._scheduler.deliver(command)
            case Stop():
                raise InternalError("stop is handled by the loop itself")

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._scheduler.submit(request, self._clock())
        except DuplicateRequest as error:
            # An answer under this key would end the other request. The hub promises not to do this.
            raise InternalError(f"the hub submitted request {request.key} while it is live") from error
        except IsthmusError as error:
            self._outbox.emit(RequestFinished(request.key, error, LegReport()))
            self._outbox.emit(RequestReleased(request.key))

    def _execute(self, plan: JointPlan, rows: list[BatchRow]) -> None:
        failed: list[int] = []
        try:
            drawn = self._runner.execute(rows)
        except NonFiniteLogits as error:
            answers = plan.answers
            keys = {str(answers[row].request.key) for row in error.rows}
            logger.error("%s", error, extra={"requests": sorted(keys)})
            drawn, failed = error.drawn, error.rows
        self._scheduler.apply(plan, drawn, frozenset(failed), self._clock())

    def _report_load(self, *, busy: bool) -> float | None:
        """Tells the hub about load when it has changed. Returns how long the inbox may sleep, None for ever."""
        idle = self._scheduler.live == 0
        if idle and self._had_work:
            self._scheduler.check_idle()
            self._had_work = False
        load, now = self._scheduler.load(), self._clock()
        due = self._told_at + LOAD_INTERVAL_S
        if load != self._told:
            if not idle and now < due:
                return 0.0 if busy else due - now
            self._outbox.emit(load)
            self._told, self._told_at = load, now
        return 0.0 if busy else None
