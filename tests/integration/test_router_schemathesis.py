"""Requests made from the published schema, right and wrong ones: an answer or a reason, never a crash."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.http.app import Limits, make_app
from isthmus_router.pipeline import Pipeline
from router_fakes import FakeCoordinator, FakeModel, FakeWorkers

pytestmark = pytest.mark.integration

COORDINATOR = FakeCoordinator(models=[FakeModel("m", 4096)])
WORKERS = FakeWorkers()


PIPELINE = Pipeline(
    COORDINATOR,
    WORKERS,
    {"m": ByteTokenizer()},
    Tracing.from_config(TelemetryConfig(), "test"),
    max_text_bytes=100_000,
)
APP = make_app(PIPELINE, Limits(1 << 20, request_timeout_s=20, client_timeout_s=20))
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@schema.parametrize()
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_crashes_the_router(case: schemathesis.Case) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        # Otherwise nearly every request would end at its unknown model.
        case.body["model"] = "m"
    response = case.call()
    # A deadline of no length is missed: 504. Everything else is an answer or the client's fault.
    assert response.status_code < 500 or response.status_code == 504, response.text
    if response.status_code >= 400 and case.method == "POST":
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
    assert COORDINATOR.open == set()
    assert WORKERS.running == 0
