"""The engine's end of engine_ipc.proto: one frame into commands, events into one frame.

Both ends are one build: a frame that can not be read is a bug, and raises FrameError.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from isthmus.v1 import engine_ipc_pb2, generation_pb2, kv_pb2, worker_service_pb2

from isthmus_core import token_ids
from isthmus_core.block_keys import join_keys
from isthmus_core.framing import FrameError
from isthmus_core.generation import chunk_from_pb, chunk_to_pb, sampling_from_pb
from isthmus_worker.engine import ContextPhase, EngineDescription, EngineLoad, EngineRequest, KvEvent, RequestType
from isthmus_worker.marks import marks_to_pb
from isthmus_worker.scheduler.events import (
    ContextDone,
    RequestFinished,
    RequestReleased,
    RequestTokens,
    RequestTookOver,
    SchedulerEvent,
)
from isthmus_worker.wire.engine_frames import Abort, EngineCommand, Stop
from isthmus_worker.wire.reports import report_to_pb
from isthmus_worker.wire.responses import load_to_pb
from isthmus_worker.wire.tokens import chunks_to_pb
from kvtransfer.errors import WireError
from kvtransfer.ports import Holder, SchedulerToHub
from kvtransfer.wire import command_from_arm, event_arm, key_from_pb, key_to_pb, trace_from_pb

if TYPE_CHECKING:
    from collections.abc import Iterable

EngineMessage = SchedulerEvent | SchedulerToHub | EngineDescription | EngineLoad


def commands_from_bytes(frame: bytes) -> list[EngineCommand]:
    """Commands of one EngineInput frame, in order. Raises FrameError when any of them is malformed."""
    pb = engine_ipc_pb2.EngineInput()
    try:
        pb.ParseFromString(frame)
        return [_command_from_pb(command) for command in pb.commands]
    except (DecodeError, WireError, ValueError) as error:
        raise FrameError(f"the hub sent a malformed frame: {error}") from error


def _command_from_pb(pb: engine_ipc_pb2.EngineCommand) -> EngineCommand:
    match pb.WhichOneof("body"):
        case "submit":
            return _request_from_pb(pb.submit)
        case "abort":
            return Abort(key_from_pb(pb.abort.key))
        case "stop":
            return Stop()
        case arm:
            command = command_from_arm(arm, pb)
            if command is None:
                raise ValueError("a command without a body, or of a kind that this build does not know")
            return command


def _request_from_pb(pb: engine_ipc_pb2.SubmitCommand) -> EngineRequest:
    return EngineRequest(
        key=key_from_pb(pb.key),
        request_type=RequestType(int(pb.request_type)),
        prompt=token_ids.unpack(pb.prompt.le_uint32),
        sampling=sampling_from_pb(pb.sampling),
        context_phase=_context_phase_from_pb(pb.context_phase) if pb.HasField("context_phase") else None,
        trace=trace_from_pb(pb.trace) if pb.HasField("trace") else None,
        cache_salt=pb.cache_salt,
        context=_holder(pb.context_instance) if pb.HasField("context_instance") else None,
        generation_waits=pb.generation_waits,
        may_take_over=pb.may_take_over,
        adapter=pb.adapter,
    )


def _holder(pb: generation_pb2.ContextPhaseParams | generation_pb2.ContextInstance) -> Holder:
    return Holder(pb.endpoint, pb.instance_id, pb.incarnation)


def _context_phase_from_pb(pb: generation_pb2.ContextPhaseParams) -> ContextPhase:
    return ContextPhase(
        key=key_from_pb(pb.key),
        first_tokens=tuple(chunk_from_pb(one) for one in pb.first_tokens),
        prompt_tokens=pb.prompt_tokens,
        holder=replace(_holder(pb), dp_rank=pb.dp_rank),
    )


def events_to_bytes(messages: Iterable[EngineMessage]) -> bytes:
    """One EngineOutput frame."""
    return engine_ipc_pb2.EngineOutput(events=[_event_to_pb(one) for one in messages]).SerializeToString()


def _event_to_pb(message: EngineMessage) -> engine_ipc_pb2.EngineEvent:
    event = engine_ipc_pb2.EngineEvent
    match message:
        case RequestTokens(key, chunk):
            return event(tokens=engine_ipc_pb2.RequestTokens(key=key_to_pb(key), chunk=chunk_to_pb(chunk)))
        case RequestTookOver(key, reason):
            said = worker_service_pb2.TookOver(reason=reason)
            return event(took_over=engine_ipc_pb2.LegTookOver(key=key_to_pb(key), event=said))
        case ContextDone(key, first, report, dp_rank):
            done = engine_ipc_pb2.ContextDone(
                key=key_to_pb(key), first_tokens=chunks_to_pb(first), report=report_to_pb(report), dp_rank=dp_rank
            )
            done.marks.extend(marks_to_pb(report.marks))
            return event(context_done=done)
        case RequestFinished():
            return event(finished=_finished_to_pb(message))
        case RequestReleased(key):
            return event(released=engine_ipc_pb2.RequestReleased(key=key_to_pb(key)))
        case KvEvent():
            stored, removed = join_keys(message.stored), join_keys(message.removed)
            return event(kv_cache=engine_ipc_pb2.KvCacheEvent(stored_keys=stored, removed_keys=removed))
        case EngineLoad():
            return event(load=load_to_pb(message))
        case EngineDescription():
            return event(ready=_ready_to_pb(message))
        case _:
            return event(**event_arm(message))


def _finished_to_pb(finished: RequestFinished) -> engine_ipc_pb2.RequestFinished:
    return engine_ipc_pb2.RequestFinished(
        key=key_to_pb(finished.key),
        status=b"" if finished.error is None else finished.error.serialize(),
        report=report_to_pb(finished.report),
        marks=marks_to_pb(finished.report.marks),
    )


def _ready_to_pb(description: EngineDescription) -> engine_ipc_pb2.EngineReady:
    return engine_ipc_pb2.EngineReady(
        engine=description.name,
        max_model_len=description.max_model_len,
        tokens_per_block=description.tokens_per_block,
        total_blocks=description.total_blocks,
        vocab_size=description.vocab_size,
        model=kv_pb2.ModelFingerprint(
            weights_digest=description.weights_digest,
            attention_digest=description.attention_digest,
            kv_dtype=description.kv_dtype,
        ),
    )
