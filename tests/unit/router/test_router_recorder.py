"""What a router counts and logs when requests end."""

from __future__ import annotations

import logging

import pytest
from google.protobuf.duration_pb2 import Duration
from isthmus.v1.generation_pb2 import RequestReport
from prometheus_client import CollectorRegistry

from isthmus_core.errors import InternalError, IsthmusError, Overloaded, UnknownModel
from isthmus_core.keys import RequestKey
from isthmus_core.metrics import Metrics
from isthmus_core.trace_context import TraceContext
from isthmus_router.chat import Conversation, Turn
from isthmus_router.recorder import RequestRecorder
from isthmus_router.requests import ChatInput, End, GenerateRequest, TextInput

TRACE = TraceContext(b"\1" * 16, b"\2" * 8)
KEY = RequestKey(1 << 40, 0)


def duration(seconds: float) -> Duration:
    made = Duration()
    made.FromNanoseconds(int(seconds * 1e9))
    return made


def report(first: float | None = 0.2) -> RequestReport:
    made = RequestReport(route=duration(0.01), total=duration(1.2), context_instance="c", generation_instance="g")
    if first is not None:
        made.time_to_first_token.CopyFrom(duration(first))
    return made


def ask(model: str = "m", text: str = "tell me", label: str = "") -> GenerateRequest:
    return GenerateRequest("op", model, TextInput(text), 10.0, label=label)


@pytest.fixture(name="site")
def _site(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "isthmus_router.recorder")
    registry = CollectorRegistry()
    return registry, RequestRecorder(Metrics(registry), ("m",))


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def test_a_request_that_ends_well(site, caplog: pytest.LogCaptureFixture):
    registry, recorder = site
    record = recorder.begin(ask(label="mine"), TRACE)
    record.key = KEY
    record.ended(End(KEY.request_id, 100, 11, 64, report()), None)
    assert value(registry, "isthmus_requests_total", model="m", outcome="ok") == 1
    assert value(registry, "isthmus_prompt_tokens_total", model="m") == 100
    assert value(registry, "isthmus_time_to_first_token_seconds_sum", model="m") == pytest.approx(0.2)
    assert value(registry, "isthmus_time_per_output_token_seconds_sum", model="m") == pytest.approx(0.1)
    assert value(registry, "isthmus_e2e_request_latency_seconds_sum", model="m") == pytest.approx(1.2)
    (line,) = caplog.records
    assert line.levelno == logging.INFO
    fields = vars(line)
    assert (fields["request_id"], fields["trace_id"]) == (KEY.request_id, "01" * 16)
    assert (fields["client_request_id"], fields["outcome"], fields["cached_tokens"]) == ("mine", "ok", 64)
    assert "prompt" not in fields
    assert "tell me" not in str(fields)


def test_a_request_without_a_token_has_no_token_times(site):
    registry, recorder = site
    recorder.begin(ask(), None).ended(End(1, 5, 0, 0, report(first=None)), None)
    assert value(registry, "isthmus_time_to_first_token_seconds_count", model="m") == 0
    assert value(registry, "isthmus_time_per_output_token_seconds_count", model="m") == 0
    recorder.begin(ask(), None).ended(End(1, 5, 1, 0, report()), None)
    assert value(registry, "isthmus_time_to_first_token_seconds_count", model="m") == 1
    assert value(registry, "isthmus_time_per_output_token_seconds_count", model="m") == 0


@pytest.mark.parametrize(
    ("failure", "outcome", "reason", "level"),
    [
        (Overloaded("router.queue", 5, 1.0), "resource_exhausted", "overloaded", logging.INFO),
        (UnknownModel("x", []), "not_found", "unknown_model", logging.INFO),
        (InternalError("a bug"), "internal", None, logging.WARNING),
        (None, "cancelled", None, logging.INFO),
    ],
)
def test_a_request_that_does_not(
    site, caplog: pytest.LogCaptureFixture, failure: IsthmusError | None, outcome: str, reason: str | None, level: int
):
    registry, recorder = site
    recorder.begin(ask(), TRACE).ended(None, failure)
    assert value(registry, "isthmus_requests_total", model="m", outcome=outcome) == 1
    refused = sum(
        sample.value for family in registry.collect() if family.name == "isthmus_refusals" for sample in family.samples
    )
    assert refused == (reason is not None)
    if reason is not None:
        assert value(registry, "isthmus_refusals_total", reason=reason) == 1
    (line,) = caplog.records
    assert line.levelno == level
    assert vars(line)["outcome"] == outcome
    assert vars(line).get("error") == (None if failure is None else failure.message)


def test_names_that_nobody_serves_do_not_become_labels(site):
    registry, recorder = site
    for number in range(100):
        recorder.begin(ask(f"made-up-{number}"), None).ended(None, UnknownModel("x", []))
    recorder.begin(ask(""), None).ended(None, None)
    assert value(registry, "isthmus_requests_total", model="unknown", outcome="not_found") == 100
    assert value(registry, "isthmus_requests_total", model="m", outcome="cancelled") == 1, "the only model"


def test_retries_and_a_schedule_that_was_not_possible(site, caplog: pytest.LogCaptureFixture):
    registry, recorder = site
    recorder.retried("lost")
    record = recorder.begin(ask(), None)
    record.key, record.retries, record.fell_back = KEY, ["lost"], True
    record.ended(End(1, 5, 1, 0, report()), None)
    assert value(registry, "isthmus_retries_total", reason="lost") == 1
    assert value(registry, "isthmus_schedule_fallbacks_total") == 1
    assert vars(caplog.records[0])["retries"] == "lost"


def test_prompts_are_logged_only_when_asked_for(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, "isthmus_router.recorder")
    recorder = RequestRecorder(log_prompts=True)
    recorder.begin(ask(text="a secret"), None).ended(None, None)
    chat = ChatInput(Conversation((Turn("user", "another one"),)))
    recorder.begin(GenerateRequest("op", "m", chat, 10.0), None).ended(None, None)
    text, conversation = (vars(line)["prompt"] for line in caplog.records)
    assert text == "a secret"
    assert "another one" in conversation


def test_what_is_looked_at_when_metrics_are_collected(site):
    registry, recorder = site
    running = [3]
    recorder.watch(lambda: running[0], lambda: running[0] > 3)
    assert value(registry, "isthmus_requests_in_flight") == 3
    assert value(registry, "isthmus_coordinator_connected") == 0
    running[0] = 4
    assert value(registry, "isthmus_requests_in_flight") == 4
    assert value(registry, "isthmus_coordinator_connected") == 1


def test_requests_for_an_adapter_count_as_its_model(site):
    registry, recorder = site
    record = recorder.begin(ask(model="m:poet"), TRACE)
    record.ended(End(KEY.request_id, 100, 11, 64, report()), None)
    assert value(registry, "isthmus_requests_total", model="m", outcome="ok") == 1
