"""What the legs of a request that starts both at once are told of each other, from the router to the engine process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from isthmus.v1 import worker_service_pb2

from isthmus_core import token_ids
from isthmus_core.errors import InternalError, InvalidRequest
from isthmus_core.keys import RequestKey
from isthmus_router import ports
from isthmus_router.worker_messages import to_event, to_request
from isthmus_worker.engine import EngineRequest, TookOver
from isthmus_worker.engine_process.frames import commands_from_bytes, events_to_bytes
from isthmus_worker.scheduler import RequestTookOver
from isthmus_worker.wire.engine_frames import LegTokens, commands_to_bytes, events_from_bytes
from isthmus_worker.wire.requests import request_from_pb
from isthmus_worker.wire.responses import event_to_pb
from kvtransfer.ports import Holder
from router_fakes import FakeInstance

GENERATION, BOTH = ports.LegKind.GENERATION, ports.LegKind.BOTH
CONTEXT = FakeInstance("context-0", "127.0.0.1:7", b"i" * 16)
_Pb = worker_service_pb2.WorkerServiceGenerateRequest


def sent(kind: ports.LegKind, **more: object) -> _Pb:
    """As the router sends it."""
    prompt = token_ids.pack([65, 66])
    return to_request(ports.Leg(RequestKey(1 << 41), kind, prompt, ports.Sampling(9), **more))  # type: ignore[arg-type]


def arrived(pb: _Pb) -> EngineRequest:
    """As the engine process has it."""
    (command,) = commands_from_bytes(commands_to_bytes([request_from_pb(pb, None)]))
    assert isinstance(command, EngineRequest)
    return command


def test_each_leg_knows_of_the_other():
    generation = arrived(sent(ports.LegKind.GENERATION, context=CONTEXT))
    assert generation.context == Holder("127.0.0.1:7", "context-0", b"i" * 16)
    assert generation.context_phase is None
    assert not generation.generation_waits
    assert generation.may_take_over, "this router understands it"
    context = arrived(sent(ports.LegKind.CONTEXT, generation_waits=True))
    assert context.generation_waits
    assert context.context is None
    assert not context.may_take_over
    assert not arrived(sent(ports.LegKind.CONTEXT)).generation_waits


def test_a_leg_that_goes_on_alone_says_so_to_the_router():
    request = arrived(sent(GENERATION, context=CONTEXT))
    (event,) = events_from_bytes(events_to_bytes([RequestTookOver(request.key, "withdrawn")]))
    assert event == LegTokens(request.key, TookOver("withdrawn"))
    assert isinstance(event, LegTokens)
    answer = event_to_pb(event.said, request, Holder("127.0.0.1:8", "generation-0", b"g" * 16))
    leg = ports.Leg(request.key, GENERATION, b"", ports.Sampling(9), context=CONTEXT)
    assert to_event(answer, leg, CONTEXT) == ports.TookOver("withdrawn")
    with pytest.raises(InternalError, match="took_over"):
        to_event(answer, replace(leg, context=None), CONTEXT)


def _change(kind: ports.LegKind, change: Callable[[_Pb], object], **more: object) -> _Pb:
    pb = sent(kind, **more)
    change(pb)
    return pb


WRONG = {
    "neither": (sent(GENERATION), "context_phase"),
    "both": (_change(GENERATION, lambda pb: pb.context_phase.SetInParent(), context=CONTEXT), "context_instance"),
    "unsplit": (sent(BOTH, context=CONTEXT), "context_instance"),
    "context leg": (sent(ports.LegKind.CONTEXT, context=CONTEXT), "context_instance"),
    "unsplit waits": (sent(BOTH, generation_waits=True), "generation_waits"),
    "generation waits": (sent(GENERATION, context=CONTEXT, generation_waits=True), "generation_waits"),
    "nothing to take over": (_change(BOTH, lambda pb: setattr(pb, "may_take_over", True)), "may_take_over"),
    "no name": (
        _change(GENERATION, lambda pb: pb.context_instance.ClearField("instance_id"), context=CONTEXT),
        "context_instance.instance_id",
    ),
    "half an incarnation": (
        _change(GENERATION, lambda pb: setattr(pb.context_instance, "incarnation", b"12"), context=CONTEXT),
        "context_instance.incarnation",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_naming_its_field(name: str):
    pb, field = WRONG[name]
    with pytest.raises(InvalidRequest) as caught:
        request_from_pb(pb, None)
    assert caught.value.field == field
