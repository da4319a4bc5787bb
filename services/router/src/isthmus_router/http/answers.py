"""Answers in OpenAI's shapes: whole, and as chunks of a stream."""

from __future__ import annotations

import json
from typing import Any, Protocol

from isthmus_router.ports import FinishReason
from isthmus_router.requests import End

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Shape(Protocol):
    """The shapes of one endpoint, for one answer of model `model`, made at Unix time `created`."""

    def whole(self, request_id: int, text: str, end: End) -> dict[str, Any]:
        """Body of an answer that is not streamed."""
        ...

    def opening(self, request_id: int) -> list[dict[str, Any]]:
        """Chunks before the first text."""
        ...

    def piece(self, request_id: int, text: str) -> dict[str, Any]:
        """Chunk with text."""
        ...

    def closing(self, request_id: int, end: End, *, usage: bool) -> list[dict[str, Any]]:
        """Chunks after the last text; with `usage` the last one carries it."""
        ...


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`."""

    def __init__(self, model: str, created: int) -> None:
        self._model = model
        self._created = created

    def whole(self, request_id: int, text: str, end: End) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _REASONS[end.reason]}
        return {**self._head(request_id, "chat.completion"), "choices": [choice], "usage": usage_of(end)}

    def opening(self, request_id: int) -> list[dict[str, Any]]:
        return [self._chunk(request_id, {"role": "assistant", "content": ""})]

    def piece(self, request_id: int, text: str) -> dict[str, Any]:
        return self._chunk(request_id, {"content": text})

    def closing(self, request_id: int, end: End, *, usage: bool) -> list[dict[str, Any]]:
        last = [self._chunk(request_id, {}, _REASONS[end.reason])]
        if usage:
            last.append({**self._head(request_id, "chat.completion.chunk"), "choices": [], "usage": usage_of(end)})
        return last

    def _chunk(self, request_id: int, delta: dict[str, str], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**self._head(request_id, "chat.completion.chunk"), "choices": [choice]}

    def _head(self, request_id: int, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{request_id}", "object": kind, "created": self._created, "model": self._model}


class CompletionShape:
    """`text_completion`, whole and in chunks."""

    def __init__(self, model: str, created: int) -> None:
        self._model = model
        self._created = created

    def whole(self, request_id: int, text: str, end: End) -> dict[str, Any]:
        return {**self._chunk(request_id, text, _REASONS[end.reason]), "usage": usage_of(end)}

    def opening(self, request_id: int) -> list[dict[str, Any]]:
        return []

    def piece(self, request_id: int, text: str) -> dict[str, Any]:
        return self._chunk(request_id, text)

    def closing(self, request_id: int, end: End, *, usage: bool) -> list[dict[str, Any]]:
        last = [self._chunk(request_id, "", _REASONS[end.reason])]
        if usage:
            last.append({**self._head(request_id), "choices": [], "usage": usage_of(end)})
        return last

    def _chunk(self, request_id: int, text: str, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {**self._head(request_id), "choices": [choice]}

    def _head(self, request_id: int) -> dict[str, Any]:
        return {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }


def usage_of(end: End) -> dict[str, int]:
    """OpenAI's `usage`."""
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": end.completion_tokens,
        "total_tokens": end.prompt_tokens + end.completion_tokens,
    }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
