"""One answer of a request: its tokens and where it is. This is what the scheduler schedules."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import InternalError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_core.keys import RequestKey
    from isthmus_worker.scheduler.request import Request


class Phase(Enum):
    """Where an answer is. Blocks are held in all phases but AWAITING, WAITING and RELEASED."""

    # Generation leg: its context leg was started at the same time and has not been scheduled yet, or the cache did not
    # come and the first tokens are not known yet. Not in the queue.
    AWAITING = "awaiting"
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
    Phase.AWAITING: frozenset({Phase.WAITING, Phase.RELEASED}),
    Phase.WAITING: frozenset({Phase.PREFILL, Phase.RECEIVING, Phase.RELEASED}),
    Phase.RECEIVING: frozenset({Phase.DECODE, Phase.WAITING, Phase.DRAINING, Phase.RELEASED}),
    Phase.PREFILL: frozenset({Phase.DECODE, Phase.OFFERED, Phase.WAITING, Phase.DRAINING, Phase.RELEASED}),
    Phase.DECODE: frozenset({Phase.WAITING, Phase.RELEASED}),
    Phase.OFFERED: frozenset({Phase.DRAINING, Phase.RELEASED}),
    Phase.DRAINING: frozenset({Phase.RELEASED}),
    Phase.RELEASED: frozenset(),
}

RUNNING = frozenset({Phase.PREFILL, Phase.DECODE, Phase.RECEIVING})
# Phases in which a peer may read or write the blocks.
PINNED = frozenset({Phase.RECEIVING, Phase.OFFERED, Phase.DRAINING})


class Answer:
    """Mutable state of one answer; only the scheduler changes it.

    `tokens` int64[length]: prompt and output so far. The KV of the first `computed` of them is in the blocks.
    `reused`: blocks at its beginning that were here when it was admitted, and `whole`: the first block of which every
    byte is there; both for each block list. A peer does not send what this answer does not see.
    `drafts`: guesses of what comes next, for one step; `proposed`: those that the running step computes.
    `names`: of its full blocks from token 0, as far as they were needed; the first `committed` can be found by others.
    """

    __slots__ = (
        "_buffer",
        "committed",
        "computed",
        "drafts",
        "holder",
        "length",
        "names",
        "order",
        "phase",
        "proposed",
        "request",
        "reused",
        "sample",
        "stepped",
        "whole",
    )

    def __init__(self, request: Request, sample: int, first: Sequence[int], phase: Phase) -> None:
        prompt = request.source.prompt
        self.request = request
        self.sample = sample
        # Who holds the blocks, for the block manager.
        self.holder: tuple[RequestKey, int] = (request.key, sample)
        # Older requests come first, and the answers of one request in order.
        self.order = (request.arrival, sample)
        self.phase = phase
        self._buffer: NDArray[np.int64] = np.empty(len(prompt) + request.source.sampling.max_tokens, np.int64)
        self.length = len(prompt) + len(first)
        self._buffer[: self.length] = (*prompt, *first)
        self.computed = 0
        self.committed = 0
        self.reused: tuple[int, ...] = ()
        self.whole: tuple[int, ...] = ()
        self.names: list[bytes] = []
        self.drafts: tuple[int, ...] = ()
        self.proposed: tuple[int, ...] = ()
        # The step in which it last took part, and its row there.
        self.stepped: tuple[int, int] = (0, 0)

    @property
    def generated(self) -> int:
        """Tokens after the prompt, those of the context leg included."""
        return self.length - self.request.prompt_length

    @property
    def missing(self) -> int:
        """Tokens of which the KV is not in the blocks."""
        return self.length - self.computed

    def move(self, to: Phase) -> None:
        """Raises InternalError for a transition that the table does not know."""
        if to not in TRANSITIONS[self.phase]:
            raise InternalError(
                f"answer {self.sample} of {self.request.key} can not go {self.phase.value} → {to.value}"
            )
        self.phase = to

    def chunk(self, count: int) -> NDArray[np.int64]:
        """The next `count` tokens to compute; a view of memory that is only ever appended to."""
        return self._buffer[self.computed : self.computed + count]

    def prompt(self) -> NDArray[np.int64]:
        """A view of the prompt, without what an earlier try has answered."""
        return self._buffer[: self.request.said_from]

    def output(self, proposed: int = 0) -> NDArray[np.int64]:
        """A view of the answer's tokens, those of an earlier try and so many proposed ones included."""
        return self._buffer[self.request.said_from : self.length + proposed]

    def packed(self, begin: int, end: int) -> bytes:
        """Tokens [begin, end) as little-endian u32."""
        return self._buffer[begin:end].astype("<u4").tobytes()

    def propose(self) -> None:
        """Drafts stand behind the last token, as if they had been said; `append` puts what is really said in their
        place."""
        self.proposed, self.drafts = self.drafts, ()
        self._buffer[self.length : self.length + len(self.proposed)] = self.proposed

    def tokens(self) -> NDArray[np.int64]:
        """A view of prompt and output."""
        return self._buffer[: self.length]

    def append(self, token: int) -> None:
        """One more token. Raises InternalError beyond max_tokens."""
        if self.length == len(self._buffer):
            raise InternalError(
                f"answer {self.sample} of {self.request.key} has all its {self.generated} tokens already"
            )
        self._buffer[self.length] = token
        self.length += 1
