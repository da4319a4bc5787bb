"""A client's request and the parts of its answer, as both front ends speak them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from isthmus.v1.generation_pb2 import RequestReport

from isthmus_core.tracing import TraceContext
from isthmus_router.chat import Conversation
from isthmus_router.ports import FinishReason
from isthmus_router.quota import Quota
from isthmus_router.sampling import SamplingOptions
from isthmus_router.schedules import Wish


@dataclass(frozen=True, slots=True)
class TextInput:
    """Plain text. `field` is what the client calls it, for error messages. `special`: with the special tokens that the
    model expects around it."""

    text: str
    field: str = "prompt"
    special: bool = True


@dataclass(frozen=True, slots=True)
class TokenInput:
    """Token ids."""

    ids: tuple[int, ...]
    field: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatInput:
    """A conversation."""

    chat: Conversation
    field: str = "messages"
    arguments_field: str = "chat_template_kwargs"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One request for text.

    `operation` names the root span. `max_tokens` None: `default_max_tokens`, at most what the model's context leaves
    (all of that when it is None too). Requests with different `cache_salt` share no cache. `wish`: how the client wants
    it divided; None = the router decides. `session` names the conversation, `tenant` who asks; both may be empty.
    `quota`: what that client may ask for (None: no limits). `label` is the client's name for the request, for traces.
    `timeout_s` counts from `arrived` (monotonic seconds); `arrived_ns` is the same moment in Unix time.
    """

    operation: str
    model: str
    input: TextInput | TokenInput | ChatInput
    timeout_s: float
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    cache_salt: bytes = b""
    request_id: int = 0
    wish: Wish | None = None
    session: str = ""
    tenant: str = ""
    quota: Quota | None = None
    label: str = ""
    trace: TraceContext | None = None
    arrived: float = field(default_factory=time.monotonic)
    arrived_ns: int = field(default_factory=time.time_ns)


@dataclass(frozen=True, slots=True)
class RatedToken:
    """A token, the bytes that it stands for (not always whole characters), and its log probability."""

    token: int
    raw: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at one position: of the chosen token and of the best ones."""

    chosen: RatedToken
    top: tuple[RatedToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """New tokens of answer `index` and the text that became complete with them (may be empty).

    `logprobs`: one per token when asked for. `reason` is set on the answer's last part; `stopped_by` then names the
    stop string or the stop token that ended it (None: the model's own end).
    """

    request_id: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    reason: FinishReason | None = None
    stopped_by: str | int | None = None


@dataclass(frozen=True, slots=True)
class End:
    """Last part of a request, after the last part of every answer: what it took and where the time went."""

    request_id: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    report: RequestReport
