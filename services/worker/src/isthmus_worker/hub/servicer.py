"""`isthmus.v1.WorkerService` over an `Engine`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import grpc.aio
from isthmus.v1 import common_pb2, timeline_pb2, worker_service_pb2, worker_service_pb2_grpc

from isthmus_core.errors import InvalidRequest, IsthmusError, NoCapacity
from isthmus_core.logs import about
from isthmus_core.rpc import abort_with, incoming_trace
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
from isthmus_worker.hub.leg_telemetry import LegTelemetry
from isthmus_worker.wire.requests import key_from_pb, request_from_pb
from isthmus_worker.wire.responses import event_to_pb, load_to_pb
from isthmus_worker.wire.timelines import timeline_to_pb
from kvtransfer.ports import Holder
from kvtransfer.rank_info import InstanceRole

logger = logging.getLogger(__name__)

_SERVED = {
    InstanceRole.CONTEXT: (RequestType.CONTEXT_ONLY,),
    # A prompt that costs less to compute than to fetch is a generation instance's own.
    InstanceRole.GENERATION: (RequestType.GENERATION_ONLY, RequestType.CONTEXT_AND_GENERATION),
    InstanceRole.CONTEXT_AND_GENERATION: (RequestType.CONTEXT_AND_GENERATION,),
}
# Legs that GetTimeline lists when no request is named.
_LATEST = 20
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the service works with once the engine is ready. `here`: this instance as its peers know it."""

    engine: Engine
    here: Holder
    load: Callable[[], EngineLoad]
    legs: LegTelemetry


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Runs legs. Until `serve` is called every call is refused as UNAVAILABLE."""

    def __init__(self, role: InstanceRole) -> None:
        self._role, self._role_changed = role, False
        self._serving: Serving | None = None

    def set_role(self, role: InstanceRole) -> None:
        """Legs of this role only from now on."""
        self._role, self._role_changed = role, True

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
            open_spans=serving.legs.tracing.open_spans(),
        )

    async def GetTimeline(
        self, request: timeline_pb2.GetTimelineRequest, context: _Context
    ) -> timeline_pb2.GetTimelineResponse:
        """Where the time of recent requests went."""
        try:
            serving = self._ready()
        except IsthmusError as error:
            await abort_with(context, error)
        timelines = serving.legs.timelines
        wanted = request.request_id
        legs = timelines.of(wanted) if wanted else timelines.latest(request.limit or _LATEST)
        instance_id = serving.here.instance_id
        return timeline_pb2.GetTimelineResponse(legs=[timeline_to_pb(one, instance_id) for one in legs])

    def _ready(self) -> Serving:
        if self._serving is None:
            raise NoCapacity("the instance is starting: its engine is not ready yet")
        return self._serving

    async def _run_leg(self, pb: worker_service_pb2.WorkerServiceGenerateRequest, context: _Context) -> None:
        serving = self._ready()
        request = request_from_pb(pb, incoming_trace(context))
        served = _SERVED[self._role]
        if request.request_type not in served:
            names = " and ".join(leg.name for leg in served)
            remedy = f"instance {serving.here.instance_id} ({self._role.name}) runs {names} legs only"
            if self._role_changed:  # placed before that: another try goes elsewhere
                raise NoCapacity(f"{remedy}: it has changed its role")
            raise InvalidRequest("request_type", request.request_type.name, remedy)
        span = serving.legs.begin(request)
        request = replace(request, trace=span.context)
        reasons: list[FinishReason] = []
        try:
            last = await self._stream(serving, request, context, reasons, pb.gather_us / 1e6)
        except IsthmusError as error:
            span.fail(error.code.name.lower(), error.message)
            logger.info("leg failed: %s", error.message, extra=about(request.key, span.context))
            raise
        except BaseException:
            remaining = cast("float | None", context.time_remaining())  # None without a deadline
            late = remaining is not None and remaining <= 0
            outcome = ("deadline_exceeded", "the deadline passed") if late else ("cancelled", "the caller went away")
            span.fail(*outcome)
            raise
        if isinstance(last, ContextReady | Finished):
            _log_recovery(request, last.report)
            span.succeed(last.report, reasons)

    async def _stream(
        self, serving: Serving, request: EngineRequest, context: _Context, reasons: list[FinishReason], gather_s: float
    ) -> EngineOutput | None:
        """Pass the leg's events on; returns the last one. Why answers ended goes to `reasons`. `gather_s`: see
        WorkerServiceGenerateRequest. What the caller did not get is cancelled or withdrawn."""
        engine = serving.engine
        # Outside of the try: when this refuses a duplicate, the live leg of that key is somebody else's.
        events = engine.submit(request)
        last: EngineOutput | None = None
        try:
            async for last in events:
                if isinstance(last, Tokens) and last.reason is not None:
                    reasons.append(last.reason)
                await context.write(event_to_pb(last, request, serving.here))
                if gather_s and isinstance(last, Tokens):
                    await events.gather(gather_s)
        except IsthmusError:
            raise  # the engine itself has ended the leg
        except BaseException as error:
            engine.abort(request.key)
            if not isinstance(error, asyncio.CancelledError):
                logger.info("leg %s ends early: %r", request.key, error, extra=about(request.key, request.trace))
            raise
        return last


def _log_recovery(request: EngineRequest, report: LegReport) -> None:
    """A request that went well in the end may still have cost twice what it should."""
    if report.handoff_failures:
        how = "its prompt was computed here" if report.recomputed else "another try came through"
        reasons = "; ".join(report.handoff_failures)
        key = request.key
        logger.warning("hand-off of %s failed (%s): %s", key, reasons, how, extra=about(key, request.trace))
