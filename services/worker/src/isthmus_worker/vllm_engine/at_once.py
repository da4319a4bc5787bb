"""Both legs of a request at once: what the hub's side of vLLM says for it. Pure: events in, messages out.

context leg      scheduled ──BindContext──▶ hub        (by the connector, which knows nothing of the first tokens)
                 sampled ──SendFirstTokens──▶ hub      (from here; an answer that has ended is withdrawn then)
generation leg   FirstTokensArrived ──▶ connector, which lets vLLM go on behind them; to the front when an answer
                                       has ended; when all have, the leg ends and vLLM never begins
                 BindFailed ─▶ the leg fails
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import IsthmusError, ScheduleUnsupported, TransferFailed
from isthmus_worker.engine import ContextReady, EngineRequest, Finished, LegReport, RequestType, Tokens
from isthmus_worker.wire.engine_frames import LegEnded
from isthmus_worker.wire.tokens import first_tokens_from_bytes, first_tokens_to_bytes
from kvtransfer.ports import BindFailed, Bound, CancelTransfer, FirstTokensArrived, SendFirstTokens, TransferFailure

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from kvtransfer.ports import BindNews

Messages = list[SendFirstTokens | CancelTransfer]


class WaitedFor:
    """Context legs whose generation legs were started at the same time."""

    def __init__(self) -> None:
        self._sampled: dict[RequestKey, list[Tokens]] = {}
        self._bound: set[RequestKey] = set()
        # The leg has ended before its binding was heard of: two sockets keep no order.
        self._unsaid: dict[RequestKey, Messages] = {}
        self._withdrawn: set[RequestKey] = set()
        # The cache was taken before the front has told the end of the leg.
        self._taken: set[RequestKey] = set()

    def begin(self, key: RequestKey) -> None:
        """A leg."""
        self._sampled[key] = []

    def tokens(self, key: RequestKey, chunk: Tokens) -> None:
        """An answer that its first token ends."""
        if key in self._sampled:
            self._sampled[key].append(chunk)

    def bound(self, key: RequestKey) -> Messages:
        """The leg is scheduled. What is to be said now."""
        if key in self._sampled:
            self._bound.add(key)
        return self._unsaid.pop(key, [])

    def ended(self, key: RequestKey, end: ContextReady | Finished | IsthmusError) -> Messages:
        """The leg is over. What is to be said now."""
        sampled, taken = self._sampled.pop(key, None), key in self._taken
        self._taken.discard(key)
        if sampled is None:
            return []
        if isinstance(end, IsthmusError):
            return []  # the connector withdraws what vLLM drops
        messages: Messages = []
        if isinstance(end, ContextReady):
            messages.append(SendFirstTokens(key, first_tokens_to_bytes(end.first_tokens)))
        else:
            in_order = sorted(sampled, key=lambda chunk: chunk.sample)
            messages.append(SendFirstTokens(key, first_tokens_to_bytes(in_order)))
            if not taken:
                messages.append(CancelTransfer(key))
                self._withdrawn.add(key)
        if taken or key in self._bound:
            return messages
        self._unsaid[key] = messages
        return []

    def over(self, key: RequestKey) -> None:
        """SendOutcome. Also then the first tokens are still to be said."""
        if key in self._sampled:
            self._taken.add(key)
        self._bound.discard(key)
        self._withdrawn.discard(key)
        self._unsaid.pop(key, None)

    def holds(self, key: RequestKey) -> bool:
        """True when vLLM keeps blocks of a leg that has ended without a hand-off, until its SendOutcome."""
        return key in self._withdrawn


class Waiting:
    """Generation legs whose context legs were started at the same time, until their first tokens have come."""

    def __init__(self) -> None:
        self._holders: dict[RequestKey, str] = {}

    def begin(self, request: EngineRequest) -> None:
        """A leg; one that waits for nobody is not remembered."""
        if request.request_type is RequestType.GENERATION_ONLY and request.context is not None:
            self._holders[request.key] = request.context.instance_id

    def over(self, key: RequestKey) -> None:
        """The leg has ended."""
        self._holders.pop(key, None)

    def heard(self, news: BindNews) -> LegEnded | None:
        """What ends a leg before vLLM has begun with it; it has to be aborted there."""
        holder = None if isinstance(news, Bound) else self._holders.pop(news.key, None)
        if holder is None:
            return None
        if isinstance(news, BindFailed):
            unknown = news.failure is TransferFailure.PEER_UNKNOWN
            refused = ScheduleUnsupported(holder, news.reason) if unknown else None
            return _end(news.key, refused or TransferFailed(news.key, holder, news.reason))
        try:
            ended = not going_on(news)
        except ValueError as error:
            return _end(news.key, TransferFailed(news.key, holder, f"first tokens: {error}"))
        return _end(news.key, Finished(LegReport())) if ended else None


def going_on(news: BindNews) -> set[int]:
    """Answers that their first tokens have not ended. Raises ValueError when these can not be read."""
    if not isinstance(news, FirstTokensArrived):
        return set()
    return {one.sample for one in first_tokens_from_bytes(news.payload) if one.reason is None}


def _end(key: RequestKey, end: Finished | IsthmusError) -> LegEnded:
    return LegEnded(key, end, LegReport())
