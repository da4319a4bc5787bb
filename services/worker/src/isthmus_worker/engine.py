"""Seam 1: the engine as the hub sees it, at request level.

There is no schedule and no step in this interface: the reference engine and the mock run their loop in a child process,
vLLM owns its own. The hub is torch-free and runs on one event loop; every method here returns quickly or awaits.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from isthmus_core.generation import FinishReason as FinishReason
from isthmus_core.generation import Sampling as Sampling
from isthmus_core.generation import TokenLogprobs as TokenLogprobs
from isthmus_core.generation import Tokens as Tokens
from isthmus_worker.marks import Mark
from kvtransfer.ports import Holder, RequestKey, TraceContext, TransferStats


class RequestType(Enum):
    """Which leg of a request this is. Values are those of `isthmus.v1.RequestType`."""

    CONTEXT_ONLY = 1
    GENERATION_ONLY = 2
    CONTEXT_AND_GENERATION = 3


@dataclass(frozen=True, slots=True)
class ContextPhase:
    """The context leg's result: what a generation leg needs to fetch the cache and go on."""

    key: RequestKey
    first_tokens: tuple[Tokens, ...]
    prompt_tokens: int
    holder: Holder


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One leg of a request. A GENERATION_ONLY leg has either the `context_phase` of a context leg that is done, or the
    `context` instance whose leg was started at the same time; no other leg has one of them.

    `generation_waits`: a CONTEXT_ONLY leg whose generation leg was started at the same time. `may_take_over`: a leg
    with a `context` may go on without it, when that is lost. `adapter`: name of a LoRA adapter, empty for none.
    """

    key: RequestKey
    request_type: RequestType
    prompt: tuple[int, ...]
    sampling: Sampling
    context_phase: ContextPhase | None = None
    trace: TraceContext | None = None
    cache_salt: bytes = b""
    context: Holder | None = None
    generation_waits: bool = False
    may_take_over: bool = False
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class HandoffReport:
    """How the cache of one request moved. `total` in seconds: from asking for it to the complete manifest."""

    stats: TransferStats
    total: float


@dataclass(frozen=True, slots=True)
class LegReport:
    """Where the time of one leg went, in seconds. None = did not happen.

    `draft_tokens`: guesses of the context leg that were tried; `accepted_draft_tokens`: of them the right ones.
    `handoff_failures`: why hand-offs failed; another one followed, or (`recomputed`) the prompt was computed here.
    `marks`: the same in more detail, from engines that keep them.
    """

    context_queue: float | None = None
    prefill: float | None = None
    handoff: HandoffReport | None = None
    generation_queue: float | None = None
    decode: float | None = None
    decode_tokens: int = 0
    cached_tokens: int = 0
    handoff_failures: tuple[str, ...] = ()
    recomputed: bool = False
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    marks: tuple[Mark, ...] = ()


@dataclass(frozen=True, slots=True)
class ContextReady:
    """A context leg is done and its pages are held. Last event of the leg. `first_tokens`: one chunk per sample; at
    least one of them has not ended. `dp_rank`: the attention-dp group that holds them."""

    first_tokens: tuple[Tokens, ...]
    report: LegReport
    dp_rank: int = 0


@dataclass(frozen=True, slots=True)
class TookOver:
    """A generation leg goes on without its context leg, and computes the prompt itself. Comes before its first Tokens,
    which begin with the first one of every answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """Every answer has had its last chunk. Last event of the leg."""

    report: LegReport


EngineOutput = Tokens | TookOver | ContextReady | Finished


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """What an engine tells about itself once it can work."""

    name: str
    max_model_len: int
    tokens_per_block: int
    total_blocks: int
    vocab_size: int
    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Load of an engine, as `isthmus.v1.InstanceLoad`. `receive_credits`: blocks that caches from context instances may
    still take."""

    running_requests: int = 0
    waiting_requests: int = 0
    held_handoffs: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    in_doubt_blocks: int = 0
    receive_credits: int = 0


@dataclass(frozen=True, slots=True)
class KvEvent:
    """Blocks became reusable (`stored`) or stopped being so. Keys as `isthmus_core.block_keys` makes them.

    `reset`: forget everything known before; `stored` is all there is. The first event of a stream is one, and so is
    the next one of a reader that has fallen far behind.
    """

    stored: tuple[bytes, ...] = field(default_factory=tuple)
    removed: tuple[bytes, ...] = field(default_factory=tuple)
    reset: bool = False


class LegEvents(Protocol):
    """The events of a leg, an async iterator."""

    def __aiter__(self) -> LegEvents: ...

    async def __anext__(self) -> EngineOutput: ...

    async def gather(self, seconds: float) -> None:
        """Let tokens come together for so long; less when the leg ends before."""
        ...


class Engine(Protocol):
    """One model replica. All calls come from the hub's event loop.

    Contract
    - `start` returns when the engine can work; it raises `isthmus_core.errors.IsthmusError` with the reason otherwise.
    - `submit` validates the request at once (raises `InvalidRequest`, `DuplicateRequest`, `Overloaded`, …) and returns
      the leg's events: any number of `Tokens` (after a `TookOver`, when there is one), then exactly one `ContextReady`
      or `Finished`; or the iterator raises an `IsthmusError`. Tokens that wait to be read come together. The key is
      live from `submit` until the engine holds nothing of it.
    - Closing the iterator early, or `abort`, cancels the leg. Neither waits: pages that a peer may still write are kept
      until they are settled, and `load` counts them.
    - After ContextReady the request's pages stay held until the hand-off is over, expires, or `abort` withdraws it.
    - `drain` stops admission and returns when nothing is left, or raises TimeoutError after `deadline_s`.
    - `stop` ends the engine and reaps its processes; running requests fail with `WorkerLost`.
    """

    async def start(self) -> EngineDescription: ...

    def submit(self, request: EngineRequest) -> LegEvents: ...

    def abort(self, key: RequestKey) -> None: ...

    async def drain(self, deadline_s: float) -> None: ...

    def load(self) -> EngineLoad: ...

    def kv_events(self) -> AsyncIterator[KvEvent]: ...

    async def stop(self) -> None: ...
