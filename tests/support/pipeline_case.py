"""A pipeline over scripted workers that tries each request once, and one request for it."""

from typing import Any

import pytest

from isthmus_core.errors import (
    IsthmusError,
)
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import Tracing
from isthmus_router.ports import ConnectionLost, FinishReason
from isthmus_router.requests import End, GenerateRequest, Part, TextInput
from isthmus_router.retry import RetryPolicy
from isthmus_router.rules import Rules
from router_bench import PipelineBench

KEY = RequestKey(MIN_GLOBAL_ID + 7)
LOST = ConnectionLost("connection reset")


class Bench(PipelineBench):
    """One try for each request."""

    def __init__(self, tracing: Tracing | None = None, **coordinator: Any) -> None:
        super().__init__(Rules(retry=RetryPolicy(max_attempts=1)), tracing, **coordinator)

    async def run(self, request: GenerateRequest) -> list[Part | End]:
        return await self.answer(request)

    async def fail(self, request: GenerateRequest) -> IsthmusError:
        with pytest.raises(IsthmusError) as caught:
            await self.run(request)
        return caught.value

    async def settle(self, *, aborted: bool, placed: bool = True) -> None:
        """Everything is over: nothing placed, nothing running, the placement finished once, the abort sent or not."""
        await self.pipeline.close()
        assert self.coordinator.open == set()
        assert self.coordinator.finished == ([KEY] if placed else [])
        assert self.workers.running == 0
        assert self.pipeline.running == 0
        assert self.workers.aborted == ([("context-0", KEY)] if aborted else [])


def ask(source: object = "abc", **changes: object) -> GenerateRequest:
    text = TextInput(source) if isinstance(source, str) else source
    fields = {"operation": "test", "model": "m", "input": text, "timeout_s": 3600.0, "request_id": KEY.request_id}
    return GenerateRequest(**{**fields, **changes})  # type: ignore[arg-type]


def text_of(parts: list[Part | End]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Part))


def reasons_of(parts: list[Part | End]) -> list[FinishReason]:
    return [part.reason for part in parts if isinstance(part, Part) and part.reason is not None]
