"""What the pipeline needs from outside: where a request goes (coordinator) and who works on it (workers)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from isthmus.v1.generation_pb2 import ContextPhaseParams, RequestReport

from isthmus_core.errors import Unreachable
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext


class InstanceRef(Protocol):
    """An instance as a placement names it."""

    @property
    def instance_id(self) -> str: ...

    @property
    def incarnation(self) -> bytes: ...

    @property
    def endpoint(self) -> str: ...


class Placement(Protocol):
    """Where a request goes. `context` None: `generation` does everything."""

    @property
    def context(self) -> InstanceRef | None: ...

    @property
    def generation(self) -> InstanceRef: ...


class ServedModel(Protocol):
    """A model that the cluster can serve now. `max_model_len`: prompt plus output in tokens."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...


class Coordinator(Protocol):
    """The coordinator, seen from a router."""

    @property
    def ready(self) -> bool:
        """True while the stream to the coordinator stands."""
        ...

    def served(self) -> Sequence[ServedModel]:
        """Models that have a usable placement."""
        ...

    def mint_id(self) -> int:
        """A new request id. Raises NoCapacity when the lease has lapsed."""
        ...

    async def select(
        self,
        key: RequestKey,
        model: str,
        prompt_tokens: int,
        max_tokens: int,
        trace: TraceContext | None,
        timeout_s: float,
    ) -> Placement:
        """A placement; holds load until `finish`. Raises an IsthmusError. A select that raises or is cancelled holds
        nothing."""
        ...

    def finish(self, key: RequestKey) -> None:
        """Release the load of a placement. Never waits."""
        ...


class LegKind(Enum):
    """Which part of a request a worker does. Values are those of `isthmus.v1.RequestType`."""

    CONTEXT = 1
    GENERATION = 2
    BOTH = 3


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a worker chooses tokens and when an answer stops, as `isthmus.v1.SamplingParams`; every field is explicit.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0, `min_p` 0, penalties 0 and `repetition_penalty` 1 do nothing.
    `logit_bias`: (token id, bias). `n` answers. `logprobs`: None = none, k = the chosen token's and the k best.
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    logprobs: int | None = None


class Schedule(Enum):
    """When the generation leg of a split request starts: after the context leg, or at the same time."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


@dataclass(frozen=True, slots=True)
class Leg:
    """One call of a worker. GENERATION has either `context_phase`, or `context` when both legs start at once.

    `context_phase` is passed on unread, so that fields that this router does not know reach the generation instance.
    Requests with different `cache_salt` share no cache. `generation_waits`: a CONTEXT leg started at the same time.
    """

    key: RequestKey
    kind: LegKind
    prompt: bytes
    sampling: Sampling
    cache_salt: bytes = b""
    context_phase: ContextPhaseParams | None = None
    context: InstanceRef | None = None
    generation_waits: bool = False


class FinishReason(Enum):
    """Why an answer ended. Values are those of `isthmus.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the chosen token, and (token id, log probability) of the best ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of answer `sample` in [0, n). `logprobs`: one per token if asked for. `reason`: on the last chunk."""

    ids: tuple[int, ...]
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class ContextReady:
    """Last event of a context leg whose pages are held for the hand-off. `first_tokens`: one chunk per answer."""

    first_tokens: tuple[Tokens, ...]
    params: ContextPhaseParams
    report: RequestReport


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of a request: every answer has had its last chunk."""

    report: RequestReport


LegEvent = Tokens | ContextReady | Finished


class ConnectionLost(Unreachable):
    """The connection to an instance broke, or none could be made."""


class Workers(Protocol):
    """The workers, seen from a router."""

    def generate(
        self, instance: InstanceRef, leg: Leg, *, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[LegEvent, None]:
        """Run a leg: any number of Tokens, then exactly one ContextReady (context legs only) or Finished.

        Raises IsthmusError: what the worker answered, `ConnectionLost` when the instance can not be reached or the
        connection broke, DeadlineExceeded after `timeout_s` seconds. Closing the generator cancels the leg.
        """
        ...

    async def abort(self, instance: InstanceRef, key: RequestKey) -> None:
        """Withdraw a context leg that holds pages; returns within seconds. Raises IsthmusError."""
        ...
