"""`isthmus.v1.WorkerService` over an `Engine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
from isthmus.v1 import common_pb2, worker_service_pb2, worker_service_pb2_grpc

from isthmus_core.errors import InvalidRequest, IsthmusError, NoCapacity
from isthmus_core.rpc import abort_with, incoming_trace
from isthmus_core.tracing import Tracing
from isthmus_worker.engine import (
    ContextReady,
    Engine,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    Finished,
    FinishReason,
    LegReport,
    RequestType,
    Tokens,
)
from isthmus_worker.hub.spans import LegSpan
from isthmus_worker.wire.requests import key_from_pb, request_from_pb
from isthmus_worker.wire.responses import event_to_pb, load_to_pb
from kvtransfer.ports import Holder
from kvtransfer.rank_info import InstanceRole

logger = logging.getLogger(__name__)

_SERVED = {
    InstanceRole.CONTEXT: RequestType.CONTEXT_ONLY,
    InstanceRole.GENERATION: RequestType.GENERATION_ONLY,
    InstanceRole.CONTEXT_AND_GENERATION: RequestType.CONTEXT_AND_GENERATION,
}
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the service works with once the engine is ready. `here`: this instance as its peers know it."""

    engine: Engine
    here: Holder
    load: Callable[[], EngineLoad]
    tracing: Tracing


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Runs legs. Until `serve` is called every call is refused as UNAVAILABLE."""

    def __init__(self, role: InstanceRole) -> None:
        self._role = role
        self._serving: Serving | None = None

    def serve(self, serving: Serving) -> None:
        """The engine is ready."""
        self._serving = serving

    async def Generate(self, request: worker_service_pb2.WorkerServiceGenerateRequest, context: _Context) -> None:
        """See worker_service.proto. Cancelling the call or its deadline cancels the leg."""
        try:
            await self._run_leg(request, context)
        except IsthmusError as error:
            await abort_with(context, error)

    async def Abort(
        self, request: worker_service_pb2.AbortRequest, context: _Context
    ) -> worker_service_pb2.AbortResponse:
        """Cancels an attempt or withdraws the pages it holds; an unknown attempt is fine."""
        try:
            self._ready().engine.abort(key_from_pb(request.key))
        except IsthmusError as error:
            await abort_with(context, error)
        return worker_service_pb2.AbortResponse()

    async def GetStatus(
        self, request: worker_service_pb2.GetStatusRequest, context: _Context
    ) -> worker_service_pb2.GetStatusResponse:
        """Who this is and how loaded."""
        try:
            serving = self._ready()
        except IsthmusError as error:
            await abort_with(context, error)
        return worker_service_pb2.GetStatusResponse(
            instance_id=serving.here.instance_id,
            incarnation=serving.here.incarnation,
            role=common_pb2.InstanceRole.Name(self._role.value),
            load=load_to_pb(serving.load()),
            open_spans=serving.tracing.open_spans(),
        )

    def _ready(self) -> Serving:
        if self._serving is None:
            raise NoCapacity("the instance is starting: its engine is not ready yet")
        return self._serving

    async def _run_leg(self, pb: worker_service_pb2.WorkerServiceGenerateRequest, context: _Context) -> None:
        serving = self._ready()
        request = request_from_pb(pb, incoming_trace(context))
        served = _SERVED[self._role]
        if request.request_type is not served:
            remedy = f"instance {serving.here.instance_id} ({self._role.name}) runs {served.name} legs only"
            raise InvalidRequest("request_type", request.request_type.name, remedy)
        span = LegSpan(serving.tracing, request, serving.here.instance_id)
        request = replace(request, trace=span.context)
        reasons: list[FinishReason] = []
        try:
            last = await self._stream(serving, request, context, reasons)
        except IsthmusError as error:
            span.fail(error.message)
            raise
        except BaseException:
            remaining = cast("float | None", context.time_remaining())  # None without a deadline
            late = remaining is not None and remaining <= 0
            span.fail("the deadline passed" if late else "the caller went away")
            raise
        if isinstance(last, ContextReady | Finished):
            _log_recovery(request, last.report)
            span.succeed(last.report, reasons)

    async def _stream(
        self, serving: Serving, request: EngineRequest, context: _Context, reasons: list[FinishReason]
    ) -> EngineOutput | None:
        """Pass the leg's events on; returns the last one. Why answers ended goes to `reasons`. What the caller did not
        get is cancelled or withdrawn."""
        engine = serving.engine
        # Outside of the try: when this refuses a duplicate, the live leg of that key is somebody else's.
        events = engine.submit(request)
        last: EngineOutput | None = None
        try:
            async for last in events:
                if isinstance(last, Tokens) and last.reason is not None:
                    reasons.append(last.reason)
                await context.write(event_to_pb(last, request, serving.here))
        except IsthmusError:
            raise  # the engine itself has ended the leg
        except BaseException as error:
            engine.abort(request.key)
            if not isinstance(error, asyncio.CancelledError):
                logger.info("leg %s ends early: %r", request.key, error, extra={"request_id": request.key.request_id})
            raise
        return last


def _log_recovery(request: EngineRequest, report: LegReport) -> None:
    """A request that went well in the end may still have cost twice what it should."""
    if report.handoff_failures:
        how = "its prompt was computed here" if report.recomputed else "another try came through"
        reasons = "; ".join(report.handoff_failures)
        key = request.key
        logger.warning("hand-off of %s failed (%s): %s", key, reasons, how, extra={"request_id": key.request_id})
