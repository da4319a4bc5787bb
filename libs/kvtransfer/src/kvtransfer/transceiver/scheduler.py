"""The scheduler role: what an engine's scheduler asks of the hand-off, and when memory may be freed. Owns no memory.

    engine thread                                   reader thread
    respond_and_send_async ──SendOffer─────▶ port     deliver(SendOutcome | ReceiveOutcome)
    request_and_receive_async ─ReceiveRequest▶ port      │ only queues
    cancel_request ──────────CancelTransfer─▶ port       ▼
    check_*_transfer_status ◀───────────── applied here, at a step boundary

Pages of a key belong to the transfer from the call that hands them over until its settled outcome has been returned by
`check_context_transfer_status` (offer) or `check_gen_transfer_status` (receive), and until nothing else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvtransfer.config import OnFailure
from kvtransfer.errors import TransferStateError
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    BindNews,
    Bound,
    CancelTransfer,
    FirstTokensArrived,
    ReceiveIntent,
    ReceiveOutcome,
    SendFirstTokens,
    SendOffer,
    SendOutcome,
    TransferFailure,
)
from kvtransfer.transceiver.deadlines import Deadlines
from kvtransfer.transceiver.inbox import Inbox
from kvtransfer.transceiver.policy import DisaggregatedParams, HandoffPolicy, Next, Receives

if TYPE_CHECKING:
    from kvtransfer.ports import HubToScheduler, RankBlocks, ReceiveRequest, RequestKey, SchedulerPort, TokenRange

# Complete receives that `commit_blocks_for_reuse` still knows; one that is forgotten only loses a chance of reuse.
_MAX_COMPLETE = 4096


@dataclass(slots=True)
class _InFlight:
    """`blocks`: the longest list of a rank, what an offer holds. `chunks`: how many were offered; `more` follow."""

    cancelled: bool = False
    blocks: int = 0
    chunks: int = 1
    more: bool = False


class SchedulerTransceiver:
    """All methods but `deliver` are called from one thread, the scheduler's. `clock` in seconds, monotonic.

    Methods that hand something over raise TransferStateError when the key is in use or after `shutdown`, and
    ConnectionError when the hub is gone; then nothing has been handed over and the pages are still the caller's.
    """

    def __init__(
        self, port: SchedulerPort, clock: Callable[[], float] = time.monotonic, policy: HandoffPolicy | None = None
    ) -> None:
        self._port, self._clock = port, clock
        self._policy = policy or HandoffPolicy()
        self._tried = Receives(self._policy)
        self._deadlines = Deadlines(self._policy.timeout_s, clock)
        self._sends: dict[RequestKey, _InFlight] = {}
        self._receives: dict[RequestKey, _InFlight] = {}
        self._prepared: set[RequestKey] = set()
        self._complete: OrderedDict[RequestKey, None] = OrderedDict()
        self._closed = False
        self._intents: set[RequestKey] = set()
        self._sent: Inbox[SendOutcome] = Inbox(clock)
        self._received: Inbox[ReceiveOutcome] = Inbox(clock)
        self._news: Inbox[BindNews] = Inbox(clock)

    # --- from the reader thread

    def deliver(self, message: HubToScheduler) -> None:
        """Takes a message of the hub from any thread, in order. It has no effect before the next check_* call."""
        match message:
            case SendOutcome():
                self._sent.put(message)
            case ReceiveOutcome():
                self._received.put(message)
            case Bound() | FirstTokensArrived() | BindFailed():
                self._news.put(message)

    # --- questions

    @property
    def pipeline_transfer_enabled(self) -> bool:
        """True when chunks are sent while later ones are still computed, so that `respond_and_send_async` is called
        once per chunk (or once, after the last one, with all pages)."""
        return True

    def consumes_transfer_buffer(self) -> bool:
        """True when receives take space in a staging buffer that admission has to count. False here: bytes are written
        straight into the destination pages."""
        return False

    def get_disaggregated_params(self) -> DisaggregatedParams:
        """What kinds of hand-off the engine may be asked for."""
        return DisaggregatedParams()

    def has_inflight_transfer(self, key: RequestKey) -> bool:
        """True while pages of the key are handed over: their settled outcome has not been returned by check_* yet."""
        return key in self._sends or key in self._receives

    def has_retired_send_session(self, key: RequestKey) -> bool:
        """True when the offer of the key is over and only waits to be taken by `check_context_transfer_status`."""
        return key in self._sends and self._sent.has(key)

    # --- context side

    def prepare_context_requests(self, keys: Iterable[RequestKey]) -> None:
        """Reserves the keys of context legs before their prefill, all or none: a key that is in use is refused here
        instead of after the work. The reservation ends with the offer or with `cancel_request`."""
        keys = list(keys)
        for index, key in enumerate(keys):
            self._check_usable(key)
            if key in self._prepared or key in keys[:index]:
                raise TransferStateError(key, "is prepared already")
        self._prepared.update(keys)

    @property
    def held_blocks(self) -> int:
        """Blocks (per rank) of finished prefills that are offered and not handed off yet. They count as load."""
        return sum(one.blocks for one in self._sends.values())

    def can_hold(self, blocks: int) -> bool:
        """True when one more offer of that many blocks stays within the caps. Ask before a context leg is admitted: a
        prefill whose pages may not be held is work for nothing."""
        fits = self.held_blocks + blocks <= self._policy.max_held_blocks
        return fits and len(self._sends) < self._policy.max_held_requests

    def respond_and_send_async(
        self,
        key: RequestKey,
        tokens: TokenRange,
        sources: Sequence[RankBlocks],
        *,
        is_last: bool = True,
        dp_rank: int = 0,
        step: int = 0,
    ) -> None:
        """Offers the pages of a prefill on attention-dp group `dp_rank` (blocks from token 0, every kernel that writes
        them has finished) and returns at once: all of them, or the chunk `tokens` when `is_last` is False or earlier
        chunks were offered. They stay pinned until `check_context_transfer_status` returns the key."""
        open_offer = self._sends.get(key)
        blocks = max((len(one.blocks) for one in sources), default=0)
        if open_offer is not None and open_offer.more:
            self._port.send(SendOffer(key, tokens, tuple(sources), open_offer.chunks, not is_last, dp_rank, step))
            open_offer.chunks += 1
            open_offer.more, open_offer.blocks = not is_last, max(blocks, open_offer.blocks)
            return
        self._check_usable(key)
        self._sends[key] = _InFlight(blocks=blocks, more=not is_last)
        try:
            self._port.send(SendOffer(key, tokens, tuple(sources), more=not is_last, dp_rank=dp_rank))
        except BaseException:
            del self._sends[key]
            raise
        self._prepared.discard(key)

    def check_context_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0) -> list[SendOutcome]:
        """Offers that are over since the last call, in order; their pages may be freed.

        Waits up to `timeout_s` seconds for `at_least` of them, never for more than are in flight.
        """
        outcomes = self._sent.take(min(at_least, len(self._sends)), timeout_s)
        for outcome in outcomes:
            self._end(self._sends, outcome.key)
        return outcomes

    def bind_context(self, key: RequestKey, dp_rank: int = 0) -> None:
        """generation_first: the context leg is scheduled on that attention-dp group. A generation leg may expose pages
        from now on; the chunks follow by `respond_and_send_async`. In flight until `check_context_transfer_status`."""
        self._check_usable(key)
        # Its chunks count from 1: none can be taken for a new offer when the attempt has ended meanwhile.
        self._sends[key] = _InFlight(more=True)
        try:
            self._port.send(BindContext(key, dp_rank))
        except BaseException:
            del self._sends[key]
            raise
        self._prepared.discard(key)

    def send_first_tokens(self, key: RequestKey, payload: bytes) -> None:
        """generation_first: what the prefill has sampled, for the generation leg. Nothing when the attempt is over."""
        self._port.send(SendFirstTokens(key, payload))

    # --- generation side

    def intend_to_receive(self, intent: ReceiveIntent) -> None:
        """generation_first: waits for the context leg without holding pages; see `check_bindings`."""
        self._check_usable(intent.key)
        if intent.key in self._intents:
            raise TransferStateError(intent.key, "waits for its context leg already")
        self._intents.add(intent.key)
        self._deadlines.left(intent.key)
        try:
            self._port.send(intent)
        except BaseException:
            self._intents.discard(intent.key)
            raise

    def check_bindings(self) -> list[BindNews]:
        """News since the last call. Bound: expose pages (`request_and_receive_async`). FirstTokensArrived, BindFailed:
        the last news of a key; a receive that was started has its own outcome."""
        news = [one for one in self._news.take() if one.key in self._intents]
        for one in news:
            if not isinstance(one, Bound):
                self._intents.discard(one.key)
        return news

    def request_and_receive_async(self, request: ReceiveRequest) -> None:
        """Exposes pages to be written and returns at once. The receive is one whole slice; only the sender cuts. After
        `Next.RETRY` the same key comes again, with other pages."""
        self._check_usable(request.key)
        if request.key in self._prepared:
            raise TransferStateError(request.key, "is prepared as a context request")
        # Before publication can escape: an outcome must always find its request.
        self._receives[request.key] = _InFlight()
        try:
            timeout_s = request.timeout_s or self._deadlines.left(request.key)
            self._port.send(replace(request, may_retry=self._tried.begin(request.key), timeout_s=timeout_s))
        except BaseException:
            del self._receives[request.key]
            raise

    def request_and_receive_sync(self, request: ReceiveRequest, deadline_s: float) -> ReceiveOutcome:
        """As `request_and_receive_async`, then waits for the first outcome of this key, at most `deadline_s` seconds.

        After the deadline the receive is cancelled and the answer is an unsettled TIMED_OUT; the settled outcome then
        comes through `check_gen_transfer_status`. Outcomes of other keys are left for that call.
        """
        self.request_and_receive_async(request)
        key = request.key
        outcome = self._received.take_first(key, deadline_s)
        if outcome is None:
            self.cancel_request(key)
            reason = f"no cache after {deadline_s:g} s"
            return ReceiveOutcome(key, settled=False, failure=TransferFailure.TIMED_OUT, reason=reason)
        self._apply_receive(outcome)
        return outcome

    def check_gen_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0) -> list[ReceiveOutcome]:
        """Outcomes of receives since the last call, in order. Settled: decode (no failure) or free the pages. Not
        settled: tell the client, keep the pages, the key comes again.

        Waits up to `timeout_s` seconds for `at_least` outcomes, never for more than receives are in flight.
        """
        outcomes = self._received.take(min(at_least, len(self._receives)), timeout_s)
        for outcome in outcomes:
            self._apply_receive(outcome)
        return outcomes

    def next_step(self, outcome: ReceiveOutcome) -> Next:
        """What to do about an outcome of `check_gen_transfer_status`; to be asked once for each, in order. When RETRY
        can not be done (no pages), call `give_up`."""
        step = self._tried.decide(outcome)
        if outcome.settled and step is not Next.RETRY:
            self._tried.forget(outcome.key)
            self._deadlines.forget(outcome.key)
        return step

    def give_up(self, key: RequestKey) -> Next:
        """Instead of a retry: the holder is told to free its pages. RECOMPUTE or FAIL, as configured."""
        step = self._tried.give_up(key)
        self.cancel_request(key)
        return step

    @property
    def recomputes(self) -> bool:
        """True when a prompt whose cache does not come is computed here."""
        return self._policy.on_failure is OnFailure.RECOMPUTE

    def failures(self, key: RequestKey) -> tuple[str, ...]:
        """Why receives of a key have failed so far, for its report; ask before the last `next_step`."""
        return self._tried.failures(key)

    def check_gen_transfer_complete(self) -> bool:
        """True when no receive is in flight."""
        return not self._receives

    def commit_blocks_for_reuse(self, key: RequestKey) -> bool:
        """True, once per receive, when the cache of the key arrived whole: only then may its blocks be indexed for
        later prompts. False when it failed or is not known any more. Raises TransferStateError while in flight."""
        if self.has_inflight_transfer(key):
            raise TransferStateError(key, "is in flight: its blocks may be incomplete")
        return self._complete.pop(key, self) is None

    # --- both

    def cancel_request(self, key: RequestKey) -> bool:
        """True: nothing of the key is in flight, its memory may be freed. False: it is withdrawn, but a write may touch
        the pages; ask again after the next check_* calls. The hub is told once."""
        self._prepared.discard(key)
        self._deadlines.forget(key)
        if self._tried.forget(key):
            self._port.send(CancelTransfer(key))
        held = [table[key] for table in (self._sends, self._receives) if key in table]
        if not held:
            if key in self._intents:
                self._intents.discard(key)
                self._port.send(CancelTransfer(key))
            return True
        self._intents.discard(key)
        if not any(one.cancelled for one in held):
            self._port.send(CancelTransfer(key))
        for one in held:
            one.cancelled = True
        return False

    def shutdown(self) -> None:
        """Takes nothing new and withdraws all that is in flight. Their outcomes still come through check_*."""
        self._closed = True
        self._prepared.clear()
        for key in (*self._sends, *self._receives, *self._intents):
            self.cancel_request(key)

    def _check_usable(self, key: RequestKey) -> None:
        if self._closed:
            raise TransferStateError(key, "came after shutdown")
        if self.has_inflight_transfer(key):
            raise TransferStateError(key, "is in flight already: use a new attempt")

    def _apply_receive(self, outcome: ReceiveOutcome) -> None:
        if outcome.key not in self._receives:
            raise TransferStateError(outcome.key, "got an outcome but is not in flight")
        if not outcome.settled:
            return
        self._end(self._receives, outcome.key)
        if outcome.failure is TransferFailure.NONE:
            self._complete[outcome.key] = None
            while len(self._complete) > _MAX_COMPLETE:
                self._complete.popitem(last=False)

    def _end(self, table: dict[RequestKey, _InFlight], key: RequestKey) -> None:
        if table.pop(key, None) is None:
            raise TransferStateError(key, "got an outcome but is not in flight")
