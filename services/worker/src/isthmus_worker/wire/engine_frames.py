"""The hub's end of engine_ipc.proto: commands into one frame, one frame into events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from isthmus.v1 import engine_ipc_pb2, worker_service_pb2

from isthmus_core.block_keys import split_keys
from isthmus_core.errors import IsthmusError, from_status_bytes
from isthmus_core.framing import FrameError
from isthmus_core.generation import chunk_from_pb
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import (
    ContextReady,
    EngineDescription,
    EngineLoad,
    EngineRequest,
    Finished,
    KvEvent,
    LegReport,
    Tokens,
    TookOver,
)
from isthmus_worker.marks import marks_from_pb
from isthmus_worker.wire.reports import report_from_pb
from isthmus_worker.wire.requests import key_to_pb, submit_to_pb
from kvtransfer.errors import WireError
from kvtransfer.ports import HubToScheduler, SchedulerToHub
from kvtransfer.wire import command_arm, event_from_arm, key_from_pb


@dataclass(frozen=True, slots=True)
class Abort:
    """Drop a request, wherever it is."""

    key: RequestKey


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave. Nothing follows."""


EngineCommand = EngineRequest | Abort | Stop | HubToScheduler


@dataclass(frozen=True, slots=True)
class LegTokens:
    """What a leg says before its end: new tokens, or that it goes on alone."""

    key: RequestKey
    said: Tokens | TookOver


@dataclass(frozen=True, slots=True)
class LegEnded:
    """The client's side of a leg is over: with its end, or with the error that ended it. `report`: also of the latter,
    as far as the leg came."""

    key: RequestKey
    end: ContextReady | Finished | IsthmusError
    report: LegReport


@dataclass(frozen=True, slots=True)
class LegReleased:
    """Nothing of a request is left in the engine."""

    key: RequestKey


EngineEvent = EngineDescription | EngineLoad | LegTokens | LegEnded | LegReleased | KvEvent | SchedulerToHub


def commands_to_bytes(commands: Iterable[EngineCommand]) -> bytes:
    """One EngineInput frame."""
    return engine_ipc_pb2.EngineInput(commands=[_command_to_pb(one) for one in commands]).SerializeToString()


def _command_to_pb(command: EngineCommand) -> engine_ipc_pb2.EngineCommand:
    match command:
        case EngineRequest():
            return engine_ipc_pb2.EngineCommand(submit=submit_to_pb(command))
        case Abort(key):
            return engine_ipc_pb2.EngineCommand(abort=engine_ipc_pb2.AbortCommand(key=key_to_pb(key)))
        case Stop():
            return engine_ipc_pb2.EngineCommand(stop=engine_ipc_pb2.StopCommand())
        case _:
            return engine_ipc_pb2.EngineCommand(**command_arm(command))


def events_from_bytes(frame: bytes) -> list[EngineEvent]:
    """Events of one EngineOutput frame, in order. Raises FrameError when any of them is malformed."""
    output = engine_ipc_pb2.EngineOutput()
    try:
        output.ParseFromString(frame)
        return list(_events(output))
    except (DecodeError, WireError, ValueError) as error:
        raise FrameError(f"the engine process sent a malformed frame: {error}") from error


def _events(output: engine_ipc_pb2.EngineOutput) -> Iterator[EngineEvent]:
    for event in output.events:
        kind = event.WhichOneof("body")
        match kind:
            case "tokens":
                yield LegTokens(key_from_pb(event.tokens.key), chunk_from_pb(event.tokens.chunk))
            case "took_over":
                yield LegTokens(key_from_pb(event.took_over.key), TookOver(event.took_over.event.reason))
            case "context_done":
                done = event.context_done
                first = tuple(chunk_from_pb(one) for one in done.first_tokens)
                report = replace(report_from_pb(done.report), marks=marks_from_pb(done.marks))
                yield LegEnded(key_from_pb(done.key), ContextReady(first, report, done.dp_rank), report)
            case "finished":
                yield _finished(event.finished)
            case "released":
                yield LegReleased(key_from_pb(event.released.key))
            case "kv_cache":
                yield _kv_event(event.kv_cache)
            case "load":
                yield _load(event.load)
            case "ready":
                yield _description(event.ready)
            case _:
                said = event_from_arm(kind, event)
                if said is None:
                    raise ValueError("an event without a body, or of a kind that this build does not know")
                yield said


def _finished(pb: engine_ipc_pb2.RequestFinished) -> LegEnded:
    report = replace(report_from_pb(pb.report), marks=marks_from_pb(pb.marks))
    return LegEnded(key_from_pb(pb.key), from_status_bytes(pb.status) if pb.status else Finished(report), report)


def _kv_event(pb: engine_ipc_pb2.KvCacheEvent) -> KvEvent:
    return KvEvent(split_keys(pb.stored_keys), split_keys(pb.removed_keys))


def _load(pb: worker_service_pb2.InstanceLoad) -> EngineLoad:
    return EngineLoad(
        running_requests=pb.running_requests,
        waiting_requests=pb.waiting_requests,
        held_handoffs=pb.held_handoffs,
        used_blocks=pb.used_blocks,
        total_blocks=pb.total_blocks,
        in_doubt_blocks=pb.in_doubt_blocks,
        receive_credits=pb.receive_credits,
    )


def _description(pb: engine_ipc_pb2.EngineReady) -> EngineDescription:
    return EngineDescription(
        name=pb.engine,
        max_model_len=pb.max_model_len,
        tokens_per_block=pb.tokens_per_block,
        total_blocks=pb.total_blocks,
        vocab_size=pb.vocab_size,
        weights_digest=pb.model.weights_digest,
        attention_digest=pb.model.attention_digest,
        kv_dtype=pb.model.kv_dtype,
    )
