"""A client's request and the parts of its answer, as both front ends speak them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from isthmus.v1.generation_pb2 import RequestReport

from isthmus_core.tracing import TraceContext
from isthmus_router.ports import FinishReason
from isthmus_router.tokenizer import Turn


@dataclass(frozen=True, slots=True)
class TextInput:
    """Plain text. `field` is what the client calls it, for error messages."""

    text: str
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids."""

    ids: tuple[int, ...]
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation."""

    turns: tuple[Turn, ...]
    field: str = "messages"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for text.

    `operation` names the root span. `max_tokens` None: `default_max_tokens`, at most what the model's context leaves
    (all of that when it is None too). `timeout_s` counts from `arrived` (monotonic seconds); `arrived_ns` is the same
    moment in Unix time.
    """

    operation: str
    model: str
    input: TextInput | TokenInput | ChatInput
    timeout_s: float
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None = None
    ignore_eos: bool = False
    request_id: int = 0
    trace: TraceContext | None = None
    arrived: float = field(default_factory=time.monotonic)
    arrived_ns: int = field(default_factory=time.time_ns)


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens and the text that became complete with them (may be empty)."""

    request_id: int
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Last part: text that was still held back, why the answer ended, and where the time went."""

    request_id: int
    text: str
    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    report: RequestReport
