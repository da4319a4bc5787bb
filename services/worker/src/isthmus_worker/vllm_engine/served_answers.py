"""What `vllm serve` answers, as the objects that the library would have given. Pure.

data: {"choices": [{"token_ids": [5], "finish_reason": null}]}       ─▶ an output
data: {"choices": [{"token_ids": [6], "finish_reason": "length"}]}   ─▶ kept until it is known
data: {"choices": [], "usage": {…}}                                  ─▶ how many tokens were cached: the last output
data: [DONE]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from prometheus_client.parser import text_string_to_metric_families

from isthmus_core.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Behind every candidate that has one.
_NO_RANK = 1 << 31


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of a token at a position; `rank` from 1."""

    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class Piece:
    """New tokens of an answer."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    logprobs: tuple[Mapping[int, Logprob], ...] | None


@dataclass(frozen=True, slots=True)
class Output:
    """As vLLM's RequestOutput."""

    outputs: tuple[Piece, ...]
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class Answers:
    """One request. Raises InternalError for what is no answer of vLLM."""

    def __init__(self) -> None:
        self._last: Output | None = None

    def line(self, line: str) -> Sequence[Output]:
        """A line of the event stream."""
        if not line.startswith("data:"):
            return ()
        text = line[len("data:") :].strip()
        if text == "[DONE]":
            return self._end(None)
        said = _parse(text)
        if "error" in said:
            return (Output((Piece((), "error", None),)),)
        if not said["choices"]:
            return self._end(_cached(said))
        output = Output(tuple(_piece(one) for one in said["choices"]))
        if any(piece.finish_reason is not None for piece in output.outputs):
            self._last = output
            return ()
        return (output,)

    def _end(self, cached: int | None) -> Sequence[Output]:
        last, self._last = self._last, None
        return () if last is None else (replace(last, num_cached_tokens=cached),)


def whole(said: Mapping[str, Any]) -> Output:
    """An answer in one piece. Raises InternalError for what is none."""
    try:
        pieces = tuple(_piece(one) for one in said["choices"])
        return Output(pieces, _cached(said), said.get("kv_transfer_params"))
    except (KeyError, TypeError) as error:
        raise InternalError(f"vllm serve answered without {error}") from error


def _parse(text: str) -> dict[str, Any]:
    try:
        said = json.loads(text)
    except ValueError as error:
        raise InternalError(f"vllm serve answered {text[:80]!r}: {error}") from error
    if not isinstance(said, dict) or not ("choices" in said or "error" in said):
        raise InternalError(f"vllm serve answered {text[:80]!r}")
    return cast("dict[str, Any]", said)


def _cached(said: Mapping[str, Any]) -> int | None:
    usage: dict[str, Any] = said.get("usage") or {}
    details: dict[str, Any] = usage.get("prompt_tokens_details") or {}
    return details.get("cached_tokens")


def _piece(choice: Mapping[str, Any]) -> Piece:
    about: dict[str, Any] = choice.get("logprobs") or {}
    content: list[dict[str, Any]] | None = about.get("content")
    logprobs = None if content is None else tuple(_position(one) for one in content)
    return Piece(tuple(choice.get("token_ids") or ()), choice.get("finish_reason"), logprobs)


def _position(said: Mapping[str, Any]) -> dict[int, Logprob]:
    """The token of a position and the best ones there."""
    every: tuple[Mapping[str, Any], ...] = (said, *said.get("top_logprobs", ()))
    return {one["token_id"]: Logprob(one["logprob"], one["rank"] or _NO_RANK) for one in every}


def refusal(status: int, text: str) -> Exception:
    """What an HTTP status other than 200 says of the request."""
    try:
        reason = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        reason = text[:200]
    if 400 <= status < 500:
        return InvalidRequest("request", "refused by vLLM", reason)
    return InternalError(f"vllm serve answered {status}: {reason}")


@dataclass(slots=True)
class Counts:
    """`labels`: settings of the cache; `usage` of its blocks in [0, 1]."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    labels: dict[str, str] = field(default_factory=dict[str, str])


def metric_values(text: str) -> Counts:
    """What /metrics says, over all engines of the server."""
    counts = Counts()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            match sample.name:
                case "vllm:num_requests_running":
                    counts.running += int(sample.value)
                case "vllm:num_requests_waiting":
                    counts.waiting += int(sample.value)
                case "vllm:kv_cache_usage_perc":
                    counts.usage = max(counts.usage, sample.value)
                case "vllm:cache_config_info":
                    counts.labels = dict(sample.labels)
                case _:
                    pass
    return counts
