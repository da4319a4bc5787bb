"""What the pipeline needs from outside: where a request goes (coordinator) and who works on it (workers)."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from isthmus.v1.generation_pb2 import ContextPhaseParams, RequestReport

from isthmus_core.errors import Unreachable
from isthmus_core.generation import FinishReason as FinishReason
from isthmus_core.generation import Sampling as Sampling
from isthmus_core.generation import TokenLogprobs as TokenLogprobs
from isthmus_core.generation import Tokens as Tokens
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

    def describe(self) -> Mapping[str, str | int | float]:
        """Why it was chosen: span attributes."""
        ...


class ServedModel(Protocol):
    """A model that the cluster can serve now. `max_model_len`: prompt plus output in tokens."""

    @property
    def name(self) -> str: ...

    @property
    def max_model_len(self) -> int: ...


class Shape(Enum):
    """How many instances may share a request: whatever there is, a pair (one prefills, one decodes), or one alone."""

    ANY = "any"
    SPLIT = "split"
    UNSPLIT = "unsplit"


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What the choice of instances depends on.

    `prompt`: its tokens as little-endian u32, for the prefix index; requests with different `cache_salt` or LoRA
    `adapter` share nothing there. `affinity` names the conversation (b"" = none): its requests go to the same place
    while that is there. `excluded`: incarnations of instances that shall not get it. `local_prefill_tokens`: a
    generation instance computes the prompt itself when at most so many of its tokens are not cached there; 0 = never.
    """

    key: RequestKey
    model: str
    prompt_tokens: int
    max_tokens: int
    trace: TraceContext | None = None
    prompt: bytes = b""
    cache_salt: bytes = b""
    affinity: bytes = b""
    excluded: tuple[bytes, ...] = ()
    shape: Shape = Shape.ANY
    local_prefill_tokens: int = 0
    adapter: str = ""


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

    async def select(self, question: PlacementRequest, timeout_s: float) -> Placement:
        """A placement; holds load until `finish`. Raises an IsthmusError. A select that raises or is cancelled holds
        nothing."""
        ...

    def prefilled(self, key: RequestKey) -> None:
        """The prompt of a placement is computed: that part of its load is over. Never waits."""
        ...

    def finish(self, key: RequestKey) -> None:
        """Release the load of a placement. Never waits."""
        ...


class LegKind(Enum):
    """Which part of a request a worker does. Values are those of `isthmus.v1.RequestType`."""

    CONTEXT = 1
    GENERATION = 2
    BOTH = 3


class Schedule(Enum):
    """When the generation leg of a split request starts: after the context leg, or at the same time."""

    CONTEXT_FIRST = "context_first"
    GENERATION_FIRST = "generation_first"


@dataclass(frozen=True, slots=True)
class Leg:
    """One call of a worker. GENERATION has either `context_phase`, or `context` when both legs start at once.

    `context_phase` is passed on unread, so that fields that this router does not know reach the generation instance.
    Requests with different `cache_salt` share no cache. `adapter`: name of a LoRA adapter, empty for none.
    `generation_waits`: a CONTEXT leg started at the same time. A GENERATION leg with `context` may take over: see
    `TookOver`.
    """

    key: RequestKey
    kind: LegKind
    prompt: bytes
    sampling: Sampling
    cache_salt: bytes = b""
    adapter: str = ""
    context_phase: ContextPhaseParams | None = None
    context: InstanceRef | None = None
    generation_waits: bool = False


@dataclass(frozen=True, slots=True)
class ContextReady:
    """Last event of a context leg whose pages are held for the hand-off. `first_tokens`: one chunk per answer."""

    first_tokens: tuple[Tokens, ...]
    params: ContextPhaseParams
    report: RequestReport


@dataclass(frozen=True, slots=True)
class TookOver:
    """A generation leg goes on without the context leg that was started with it. Its Tokens, which come later, begin
    with the first one of every answer."""

    reason: str


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
    ) -> AsyncGenerator[LegEvent | TookOver, None]:
        """Run a leg: any number of Tokens (after a TookOver, when there is one), then exactly one ContextReady (context
        legs only) or Finished.

        Raises IsthmusError: what the worker answered, `ConnectionLost` when the instance can not be reached or the
        connection broke, DeadlineExceeded after `timeout_s` seconds. Closing the generator cancels the leg.
        """
        ...

    async def abort(self, instance: InstanceRef, key: RequestKey) -> None:
        """Withdraw a context leg that holds pages; returns within seconds. Raises IsthmusError."""
        ...
