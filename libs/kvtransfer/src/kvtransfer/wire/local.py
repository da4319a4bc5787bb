"""transfer_local.proto: frames between a hub and an engine that starts its own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from isthmus.v1 import common_pb2, transfer_local_pb2

from kvtransfer.errors import WireError
from kvtransfer.local.messages import LOCAL_VERSION, LocalHello, LocalScheduler, LocalWelcome
from kvtransfer.ports import Holder, HubToScheduler, SchedulerToHub
from kvtransfer.rank_info import InstanceRole
from kvtransfer.wire._read import MAX_REASON_SENT, enum, incarnation, limited, parse, present, text
from kvtransfer.wire.arms import command_arm, command_from_arm, event_arm, event_from_arm
from kvtransfer.wire.geometry import MAX_RANKS, model_from_pb, model_to_pb
from kvtransfer.wire.page_tables import MAX_NAME
from kvtransfer.wire.rank import MAX_BATCH

if TYPE_CHECKING:
    from collections.abc import Iterable


def local_hello_to_bytes(hello: LocalHello) -> bytes:
    """Process of the engine to the hub."""
    pb = transfer_local_pb2.LocalHello(version=LOCAL_VERSION, world_size=hello.world_size)
    match hello.who:
        case int():
            pb.rank.rank = hello.who
        case LocalScheduler():
            pb.scheduler.CopyFrom(
                transfer_local_pb2.LocalScheduler(
                    model=model_to_pb(hello.who.model),
                    tokens_per_block=hello.who.tokens_per_block,
                    total_blocks=hello.who.total_blocks,
                    max_model_len=hello.who.max_model_len,
                    vocab_size=hello.who.vocab_size,
                    engine=hello.who.engine,
                )
            )
    return pb.SerializeToString()


def local_hello_from_bytes(data: bytes) -> LocalHello:
    """Raises WireError naming the field: another version of the schema is one."""
    pb = parse(transfer_local_pb2.LocalHello, data, "local_hello")
    if pb.version != LOCAL_VERSION:
        raise WireError("local_hello.version", f"{pb.version}, this hub speaks {LOCAL_VERSION}; use one release")
    if not 0 < pb.world_size <= MAX_RANKS:
        raise WireError("local_hello.world_size", f"{pb.world_size} must lie in [1, {MAX_RANKS}]")
    match cast("str | None", pb.WhichOneof("who")):
        case "rank":
            if pb.rank.rank >= pb.world_size:
                raise WireError("local_hello.rank", f"{pb.rank.rank} of {pb.world_size} ranks")
            return LocalHello(pb.world_size, pb.rank.rank)
        case "scheduler":
            present(pb.scheduler, "model", "local_hello.scheduler")
            facts = LocalScheduler(
                model_from_pb(pb.scheduler.model, "local_hello.scheduler.model"),
                pb.scheduler.tokens_per_block,
                pb.scheduler.total_blocks,
                pb.scheduler.max_model_len,
                pb.scheduler.vocab_size,
                text(pb.scheduler.engine, "local_hello.scheduler.engine", MAX_NAME),
            )
            return LocalHello(pb.world_size, facts)
        case _:
            raise WireError("local_hello.who", "missing, or of a kind this build does not know")


def local_refusal_to_bytes(reason: str) -> bytes:
    """Hub to process: it is not wanted."""
    return transfer_local_pb2.LocalWelcome(refused=reason[:MAX_REASON_SENT] or "refused").SerializeToString()


def local_welcome_to_bytes(welcome: LocalWelcome) -> bytes:
    """Hub to process."""
    return transfer_local_pb2.LocalWelcome(
        instance_id=welcome.here.instance_id,
        incarnation=welcome.here.incarnation,
        endpoint=welcome.here.endpoint,
        role=common_pb2.InstanceRole.Name(welcome.role.value),
        backend=welcome.backend,
        max_held_requests=welcome.max_held_requests,
        max_held_share=welcome.max_held_share,
        recompute=welcome.recompute,
        probe=welcome.probe,
        require_path=welcome.require_path,
        max_peers=welcome.max_peers,
    ).SerializeToString()


def local_welcome_from_bytes(data: bytes) -> LocalWelcome | str:
    """The welcome, or why the process is not wanted. Raises WireError naming the field."""
    pb = parse(transfer_local_pb2.LocalWelcome, data, "local_welcome")
    if pb.refused:
        return text(pb.refused, "local_welcome.refused")
    if not pb.max_peers:
        raise WireError("local_welcome.max_peers", "0; the hub is of an older release, use one release")
    return LocalWelcome(
        Holder(
            text(pb.endpoint, "local_welcome.endpoint", MAX_NAME),
            text(pb.instance_id, "local_welcome.instance_id", MAX_NAME),
            incarnation(pb.incarnation, "local_welcome"),
        ),
        enum(InstanceRole, pb.role, "local_welcome.role"),
        text(pb.backend, "local_welcome.backend", MAX_NAME),
        pb.max_held_requests,
        pb.max_held_share,
        pb.recompute,
        pb.probe,
        text(pb.require_path, "local_welcome.require_path", MAX_NAME),
        pb.max_peers,
    )


def local_output_to_bytes(events: Iterable[SchedulerToHub]) -> bytes:
    """One LocalSchedulerOutput frame."""
    make = transfer_local_pb2.LocalSchedulerEvent
    return transfer_local_pb2.LocalSchedulerOutput(
        events=[make(**event_arm(one)) for one in events]
    ).SerializeToString()


def local_output_from_bytes(data: bytes) -> tuple[SchedulerToHub, ...]:
    """Raises WireError when any event is malformed: then none of them is used."""
    pb = parse(transfer_local_pb2.LocalSchedulerOutput, data, "local_output")
    limited(pb.events, MAX_BATCH, "local_output.events")
    return tuple(_event_from_pb(one) for one in pb.events)


def _event_from_pb(pb: transfer_local_pb2.LocalSchedulerEvent) -> SchedulerToHub:
    event = event_from_arm(cast("str | None", pb.WhichOneof("body")), pb)
    if event is None:
        raise WireError("local_output.body", "missing, or of a kind this build does not know")
    return event


def local_input_to_bytes(messages: Iterable[HubToScheduler]) -> bytes:
    """One LocalSchedulerInput frame."""
    make = transfer_local_pb2.LocalSchedulerCommand
    said = [make(**command_arm(one)) for one in messages]
    return transfer_local_pb2.LocalSchedulerInput(commands=said).SerializeToString()


def local_input_from_bytes(data: bytes) -> tuple[HubToScheduler, ...]:
    """Raises WireError when any message is malformed: then none of them is used."""
    pb = parse(transfer_local_pb2.LocalSchedulerInput, data, "local_input")
    limited(pb.commands, MAX_BATCH, "local_input.commands")
    return tuple(_command_from_pb(one) for one in pb.commands)


def _command_from_pb(pb: transfer_local_pb2.LocalSchedulerCommand) -> HubToScheduler:
    message = command_from_arm(cast("str | None", pb.WhichOneof("body")), pb)
    if message is None:
        raise WireError("local_input.body", "missing, or of a kind this build does not know")
    return message
