"""What a client says beside the text reaches the placement, over both front ends; overload is answered early."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from isthmus.v1 import inference_service_pb2 as pb

from isthmus_core.config import TelemetryConfig
from isthmus_core.errors import InvalidRequest
from isthmus_core.tracing import Tracing
from isthmus_router import routing
from isthmus_router.affinity import affinity_key, tenant_of
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.grpc_messages import parse_generate
from isthmus_router.http.app import Limits, make_app
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import FinishReason, LegKind, Shape, Tokens
from isthmus_router.requests import TextInput
from isthmus_router.rules import AdmissionRule, Rules
from isthmus_router.schedules import LocalPrefillRule, Wish
from router_fakes import FakeCoordinator, FakeWorkers, Hang, finished

BODY = {"model": "m", "prompt": "abc", "max_tokens": 3}


class Site:
    def __init__(self, rules: Rules | None = None, *, one_by_one: bool = True) -> None:
        self.coordinator, self.workers = FakeCoordinator(), FakeWorkers()
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        tokenizers = {"m": ByteTokenizer()}
        self.pipeline = Pipeline(
            self.coordinator,
            self.workers,
            tokenizers,
            tracing,
            max_text_bytes=1000,
            rules=rules,
            one_by_one=one_by_one,
        )
        app = make_app(self.pipeline, Limits(50_000, 20, 20))
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://router")

    async def post(self, headers: dict[str, str] | None = None, **changes: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", content=json.dumps({**BODY, **changes}), headers=headers)


@pytest.mark.parametrize(
    ("schedule", "shape", "early"),
    [
        ("context_first", Shape.SPLIT, False),
        ("generation_first", Shape.SPLIT, True),
        ("unsplit", Shape.UNSPLIT, False),
        (None, Shape.ANY, False),
    ],
)
async def test_a_schedule_that_the_client_orders(schedule: str | None, shape: Shape, early: bool) -> None:
    site = Site(Rules(local_prefill=LocalPrefillRule(True)))
    assert (await site.post(schedule=schedule)).status_code == 200
    (question,) = site.coordinator.questions
    assert question.shape is shape
    # Who orders how it is divided does not get something else for being cheaper.
    assert (question.local_prefill_tokens > 0) == (schedule is None)
    context = next(leg for _, leg in site.workers.legs if leg.kind is LegKind.CONTEXT)
    assert context.generation_waits == early


async def test_an_unknown_schedule_is_refused_by_name() -> None:
    response = await Site().post(schedule="whenever")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "schedule")
    request = pb.InferenceServiceGenerateRequest(prompt="x", schedule=99)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="schedule"):
        parse_generate(request, 5.0, None)


async def test_the_session_and_the_tenant_make_the_key_of_the_conversation() -> None:
    site = Site()
    await site.post({"x-session-id": "s-1", "authorization": "Bearer key"})
    await site.post({"x-session-id": "s-1", "x-tenant-id": "team"})
    tenants = (tenant_of("", "Bearer key"), "team")
    keys = [affinity_key("s-1", tenant, TextInput("abc")) for tenant in tenants]
    assert [question.affinity for question in site.coordinator.questions] == keys
    assert (await site.post({"x-session-id": "s" * 300})).status_code == 400


def test_the_same_over_grpc() -> None:
    message = pb.InferenceServiceGenerateRequest(
        prompt="x", schedule=pb.REQUEST_SCHEDULE_GENERATION_FIRST, session_id="mine"
    )
    request = parse_generate(message, 5.0, None, session="of the metadata", tenant="team")
    assert (request.wish, request.session, request.tenant) == (Wish.GENERATION_FIRST, "mine", "team")
    request = parse_generate(pb.InferenceServiceGenerateRequest(prompt="x"), 5.0, None, session="of the metadata")
    assert (request.wish, request.session) == (None, "of the metadata")


async def test_a_full_router_refuses_with_the_time_to_come_back() -> None:
    site = Site(Rules(admission=AdmissionRule(max_running=1)))
    hang = Hang()
    site.workers.scripts[LegKind.CONTEXT] = [hang]
    first = asyncio.create_task(site.post())
    await hang.reached.wait()
    response = await site.post()
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    assert len(site.coordinator.questions) == 1, "nobody was asked"
    first.cancel()
    await asyncio.wait((first,))
    site.workers.scripts = FakeWorkers().scripts
    assert (await site.post()).status_code == 200


async def test_tokens_that_came_together_are_events_of_their_own_unless_that_was_wanted() -> None:
    async def texts(site: Site) -> list[str]:
        together = Tokens((105, 33), reason=FinishReason.STOP)
        site.workers.scripts[LegKind.GENERATION] = [together, finished(handoff=True)]
        response = await site.post(stream=True)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]"
        return [json.loads(line)["choices"][0]["text"] for line in lines[:-1]]

    assert await texts(Site()) == ["H", "i", "!"]
    assert await texts(Site(one_by_one=False)) == ["H", "i!"]


async def test_a_model_that_has_a_place_before_it_is_named_is_waited_for() -> None:
    """A coordinator that was started again places requests a moment before it says what is served."""
    site = Site()
    models, site.coordinator.models = site.coordinator.models, []
    asking = asyncio.create_task(site.post())
    await site.coordinator.selecting.wait()
    await asyncio.sleep(0.05)
    assert not asking.done()
    site.coordinator.models = models
    assert (await asking).status_code == 200
    assert site.coordinator.open == set()


async def test_a_model_that_is_never_named_is_not_waited_for_to_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_NEWS_S", 0.05)
    site = Site()
    site.coordinator.models = []
    response = await site.post()
    assert response.status_code == 503
    assert "only just being served" in response.json()["error"]["message"]
    assert site.coordinator.open == set()
