"""What the gRPC API answers."""

from __future__ import annotations

from dataclasses import replace

from isthmus.v1 import generation_pb2, worker_service_pb2

from isthmus_core.generation import chunk_to_pb
from isthmus_worker.engine import (
    ContextPhase,
    ContextReady,
    EngineLoad,
    EngineOutput,
    EngineRequest,
    Finished,
    LegReport,
    RequestType,
    Tokens,
    TookOver,
)
from isthmus_worker.wire.reports import report_to_pb
from isthmus_worker.wire.requests import context_phase_to_pb
from kvtransfer.ports import Holder

_Response = worker_service_pb2.WorkerServiceGenerateResponse


def event_to_pb(event: EngineOutput, request: EngineRequest, here: Holder) -> _Response:
    """One event of a leg. `here`: this instance as its peers know it."""
    match event:
        case Tokens():
            return _Response(tokens=chunk_to_pb(event))
        case TookOver(reason):
            return _Response(took_over=worker_service_pb2.TookOver(reason=reason))
        case ContextReady(first_tokens, report, dp_rank):
            phase = ContextPhase(request.key, first_tokens, len(request.prompt), replace(here, dp_rank=dp_rank))
            ready = worker_service_pb2.ContextReady(
                params=context_phase_to_pb(phase), report=_report(report, request, here)
            )
            return _Response(context_ready=ready)
        case Finished(report):
            return _Response(finished=worker_service_pb2.Finished(report=_report(report, request, here)))


def _report(report: LegReport, request: EngineRequest, here: Holder) -> generation_pb2.RequestReport:
    pb = report_to_pb(report)
    if request.request_type is not RequestType.GENERATION_ONLY:
        pb.context_instance = here.instance_id
    if request.request_type is not RequestType.CONTEXT_ONLY:
        pb.generation_instance = here.instance_id
    return pb


def load_to_pb(load: EngineLoad) -> worker_service_pb2.InstanceLoad:
    """For status and registration."""
    return worker_service_pb2.InstanceLoad(
        running_requests=load.running_requests,
        waiting_requests=load.waiting_requests,
        held_handoffs=load.held_handoffs,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        in_doubt_blocks=load.in_doubt_blocks,
        receive_credits=load.receive_credits,
    )
