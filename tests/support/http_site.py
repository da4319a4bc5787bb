"""The HTTP application over scripted workers, and a client of it."""

import json
from typing import Any

import httpx

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.http.app import Limits, make_app
from isthmus_router.pipeline import Pipeline
from router_fakes import FakeCoordinator, FakeWorkers

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "abc"}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}


class Site:
    """The application, a client of it, and the fakes behind."""

    def __init__(self, request_timeout_s: float = 20.0, client_timeout_s: float = 20.0) -> None:
        self.coordinator = FakeCoordinator()
        self.workers = FakeWorkers()
        tracing = Tracing.from_config(TelemetryConfig(), "test")
        self.pipeline = Pipeline(
            self.coordinator, self.workers, {"m": ByteTokenizer()}, tracing, max_text_bytes=100_000
        )
        self.app = make_app(self.pipeline, Limits(50_000, request_timeout_s, client_timeout_s))
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")

    async def post(self, kind: str, body: Any) -> httpx.Response:
        return await self.client.post(PATHS[kind], content=body if isinstance(body, bytes) else json.dumps(body))


def events(response: httpx.Response) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
