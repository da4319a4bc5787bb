"""One request in the scheduler: its tokens, where it is, and its time stamps."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError
from isthmus_worker.engine import HandoffReport, LegReport, RequestType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_worker.engine import EngineRequest


class Phase(Enum):
    """Where a request is. Blocks are held in all phases but WAITING and RELEASED."""

    # In the queue.
    WAITING = "waiting"
    # Generation leg: its blocks are exposed, the cache is on its way.
    RECEIVING = "receiving"
    # Computing tokens of which the KV is missing.
    PREFILL = "prefill"
    # Computing one token a step.
    DECODE = "decode"
    # Context leg: done, its blocks are offered.
    OFFERED = "offered"
    # The client's side is over, but a peer may still touch the blocks.
    DRAINING = "draining"
    # Gone.
    RELEASED = "released"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.RECEIVING, Phase.RELEASED}),
    Phase.RECEIVING: frozenset({Phase.DECODE, Phase.DRAINING, Phase.RELEASED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.OFFERED, Phase.WAITING, Phase.RELEASED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.RELEASED}),
    Phase.OFFERED: frozenset({Phase.DRAINING, Phase.RELEASED}),
    Phase.DRAINING: frozenset({Phase.RELEASED}),
    Phase.RELEASED: frozenset(),
}

RUNNING = frozenset({Phase.PREFILL, Phase.DECODE, Phase.RECEIVING})
# Phases in which a peer may read or write the blocks.
PINNED = frozenset({Phase.RECEIVING, Phase.OFFERED, Phase.DRAINING})


class Request:
    """Mutable state of one request; only the scheduler changes it.

    `tokens` int64[length]: prompt and output so far. The KV of the first `computed` of them is in the blocks.
    """

    __slots__ = (
        "_buffer",
        "_max_length",
        "admitted_at",
        "arrival",
        "computed",
        "decode_from",
        "generated",
        "handoff",
        "key",
        "last_token_at",
        "leg_tokens",
        "length",
        "over",
        "phase",
        "prefilled_at",
        "received",
        "source",
        "stop",
        "submitted_at",
    )

    def __init__(self, request: EngineRequest, arrival: int, now: float) -> None:
        first = () if request.context_phase is None else request.context_phase.first_tokens
        self.source = request
        self.key = request.key
        self.arrival = arrival
        self.phase = Phase.WAITING
        self.stop = frozenset(request.sampling.stop_token_ids)
        self._max_length = len(request.prompt) + request.sampling.max_tokens
        self._buffer: NDArray[np.int64] = np.empty(self._max_length, np.int64)
        self.length = len(request.prompt) + len(first)
        self._buffer[: self.length] = (*request.prompt, *first)
        self.computed = 0
        # Tokens after the prompt, those of the context leg included.
        self.generated = len(first)
        # Tokens made by this leg.
        self.leg_tokens = 0
        # The client's side is over.
        self.over = False
        # Generation leg: the cache has been here, so that a preemption is followed by computing, not by a hand-off.
        self.received = False
        self.submitted_at = now
        self.admitted_at: float | None = None
        self.prefilled_at: float | None = None
        self.decode_from: float | None = None
        self.last_token_at: float | None = None
        self.handoff: HandoffReport | None = None

    @property
    def leg(self) -> RequestType:
        """Which leg of a request this is."""
        return self.source.request_type

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt)

    @property
    def needs_cache(self) -> bool:
        """True when the KV of the prompt comes from a context instance."""
        return self.leg is RequestType.GENERATION_ONLY and not self.received

    @property
    def missing(self) -> int:
        """Tokens of which the KV is not in the blocks."""
        return self.length - self.computed

    def move(self, to: Phase) -> None:
        """Raises InternalError for a transition that the table does not know."""
        if to not in TRANSITIONS[self.phase]:
            raise InternalError(f"request {self.key} can not go from {self.phase.value} to {to.value}")
        self.phase = to

    def chunk(self, count: int) -> NDArray[np.int64]:
        """The next `count` tokens to compute; a view of memory that is only ever appended to."""
        return self._buffer[self.computed : self.computed + count]

    def append(self, token: int, now: float) -> None:
        """One more token of this leg. Raises InternalError beyond max_tokens."""
        if self.length == self._max_length:
            raise InternalError(f"request {self.key} has all its {self.generated} tokens already")
        self._buffer[self.length] = token
        self.length += 1
        self.generated += 1
        self.leg_tokens += 1
        self.last_token_at = now

    def report(self) -> LegReport:
        """Where the time of this leg went so far."""
        admitted, generation = self.admitted_at, self.leg is RequestType.GENERATION_ONLY
        queued = None if admitted is None else admitted - self.submitted_at
        return LegReport(
            context_queue=None if generation else queued,
            prefill=_between(admitted, self.prefilled_at),
            handoff=self.handoff,
            generation_queue=queued if generation else None,
            decode=_between(self.decode_from, self.last_token_at),
            decode_tokens=max(self.leg_tokens - (0 if generation else 1), 0),
        )


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds; None when one of the two has not happened, or not in this order (the first decode step is running)."""
    return None if begin is None or end is None or end < begin else end - begin
