"""Answers in OpenAI's shapes: whole, and as chunks of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Protocol

from isthmus_router.http.logprobs import CompletionLogprobs, chat_logprobs
from isthmus_router.ports import FinishReason
from isthmus_router.requests import End, Logprobs, Part

_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Choice:
    """What has come of one answer so far; also a piece of one."""

    index: int
    texts: list[str] = field(default_factory=list[str])
    logprobs: list[Logprobs] = field(default_factory=list[Logprobs])
    reason: FinishReason | None = None
    stopped_by: str | int | None = None

    def add(self, part: Part) -> None:
        """Take a part in."""
        self.texts.append(part.text)
        self.logprobs.extend(part.logprobs)
        self.reason, self.stopped_by = part.reason, part.stopped_by

    def ended(self) -> dict[str, Any]:
        """`finish_reason`, and what stopped the answer when it has ended."""
        if self.reason is None:
            return {"finish_reason": None}
        return {"finish_reason": _REASONS[self.reason], "stop_reason": self.stopped_by}


class Shape(Protocol):
    """The shapes of one endpoint, for one exchange."""

    def whole(self, request_id: int, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """Body of an answer that is not streamed."""
        ...

    def opening(self, request_id: int, index: int) -> dict[str, Any] | None:
        """Chunk before the first one of a choice, if the endpoint has one."""
        ...

    def piece(self, request_id: int, piece: Choice) -> dict[str, Any]:
        """Chunk of a choice."""
        ...

    def usage(self, request_id: int, usage: dict[str, Any]) -> dict[str, Any]:
        """Chunk that carries the usage and no choice."""
        ...


class ChatShape:
    """`chat.completion` and `chat.completion.chunk`. `logprobs`: whether they were asked for; `with_usage`: whether a
    stream will end with the usage, so that the other chunks say that theirs is null."""

    def __init__(self, model: str, created: int, *, logprobs: bool, with_usage: bool) -> None:
        self._model = model
        self._created = created
        self._logprobs = logprobs
        self._null_usage = {"usage": None} if with_usage else {}

    def whole(self, request_id: int, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        rows = [
            {
                "index": choice.index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._rated(choice),
                **choice.ended(),
            }
            for choice in choices
        ]
        return {**self._head(request_id, "chat.completion"), "choices": rows, "usage": usage}

    def opening(self, request_id: int, index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return self._chunk(request_id, {"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def piece(self, request_id: int, piece: Choice) -> dict[str, Any]:
        text = "".join(piece.texts)
        delta = {"content": text} if text or piece.reason is None else {}
        return self._chunk(
            request_id, {"index": piece.index, "delta": delta, "logprobs": self._rated(piece), **piece.ended()}
        )

    def usage(self, request_id: int, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(request_id, "chat.completion.chunk"), "choices": [], "usage": usage}

    def _rated(self, choice: Choice) -> dict[str, Any] | None:
        return chat_logprobs(choice.logprobs) if self._logprobs else None

    def _chunk(self, request_id: int, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(request_id, "chat.completion.chunk"), "choices": [choice], **self._null_usage}

    def _head(self, request_id: int, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{request_id}", "object": kind, "created": self._created, "model": self._model}


class CompletionShape:
    """`text_completion`, whole and in chunks; options as for `ChatShape`."""

    def __init__(self, model: str, created: int, *, logprobs: bool, with_usage: bool) -> None:
        self._model = model
        self._created = created
        self._logprobs = logprobs
        self._null_usage = {"usage": None} if with_usage else {}
        self._rated_so_far: dict[int, CompletionLogprobs] = {}

    def whole(self, request_id: int, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(request_id), "choices": [self._row(choice) for choice in choices], "usage": usage}

    def opening(self, request_id: int, index: int) -> None:
        return None

    def piece(self, request_id: int, piece: Choice) -> dict[str, Any]:
        return {**self._head(request_id), "choices": [self._row(piece)], **self._null_usage}

    def usage(self, request_id: int, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(request_id), "choices": [], "usage": usage}

    def _row(self, choice: Choice) -> dict[str, Any]:
        rated: dict[str, Any] | None = None
        if self._logprobs:
            rated = self._rated_so_far.setdefault(choice.index, CompletionLogprobs()).push(choice.logprobs)
        return {"index": choice.index, "text": "".join(choice.texts), "logprobs": rated, **choice.ended()}

    def _head(self, request_id: int) -> dict[str, Any]:
        return {
            "id": f"cmpl-{request_id}",
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
        }


def usage_of(ends: Sequence[End]) -> dict[str, Any]:
    """OpenAI's `usage`, over all requests of an exchange."""
    prompt, completion = sum(end.prompt_tokens for end in ends), sum(end.completion_tokens for end in ends)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(end.cached_tokens for end in ends)},
    }


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventFrame:
    """The events of one choice whose text alone changes: all but the text is made once."""

    _MARK = "\x00"

    def __init__(self, shape: Shape, request_id: int, index: int) -> None:
        whole = event(shape.piece(request_id, Choice(index, [self._MARK])))
        self._before, self._after = whole.split(encode_basestring(self._MARK).encode())

    def event(self, text: str) -> bytes:
        """As `event` of a piece with this text and nothing else."""
        return self._before + encode_basestring(text).encode() + self._after


DONE = b"data: [DONE]\n\n"
