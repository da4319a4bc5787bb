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

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from kvtransfer.errors import TransferStateError
from kvtransfer.ports import CancelTransfer, ReceiveOutcome, SendOffer, SendOutcome, TransferFailure

if TYPE_CHECKING:
    from kvtransfer.ports import HubToScheduler, RankBlocks, ReceiveRequest, RequestKey, SchedulerPort, TokenRange

Outcome = TypeVar("Outcome", SendOutcome, ReceiveOutcome)

# Complete receives that `commit_blocks_for_reuse` still knows; one that is forgotten only loses a chance of reuse.
_MAX_COMPLETE = 4096


@dataclass(frozen=True, slots=True)
class DisaggregatedParams:
    """How this build hands off, for the engine's own description of itself."""

    schedules: tuple[str, ...] = ("context_first",)
    pipeline_transfer: bool = False
    transfer_buffer: bool = False


@dataclass(slots=True)
class _InFlight:
    cancelled: bool = False


class SchedulerTransceiver:
    """All methods but `deliver` are called from one thread, the scheduler's. `clock` in seconds, monotonic.

    Methods that hand something over raise TransferStateError when the key is in use or after `shutdown`, and
    ConnectionError when the hub is gone; then nothing has been handed over and the pages are still the caller's.
    """

    def __init__(self, port: SchedulerPort, clock: Callable[[], float] = time.monotonic) -> None:
        self._port, self._clock = port, clock
        self._sends: dict[RequestKey, _InFlight] = {}
        self._receives: dict[RequestKey, _InFlight] = {}
        self._prepared: set[RequestKey] = set()
        self._complete: OrderedDict[RequestKey, None] = OrderedDict()
        self._closed = False
        self._arrived = threading.Condition()
        self._send_inbox: deque[SendOutcome] = deque()
        self._receive_inbox: deque[ReceiveOutcome] = deque()

    # --- from the reader thread

    def deliver(self, message: HubToScheduler) -> None:
        """Takes a message of the hub from any thread, in order. It has no effect before the next check_* call."""
        with self._arrived:
            if isinstance(message, SendOutcome):
                self._send_inbox.append(message)
            else:
                self._receive_inbox.append(message)
            self._arrived.notify_all()

    # --- questions

    @property
    def pipeline_transfer_enabled(self) -> bool:
        """True when chunks are sent while later ones are still computed, so that `respond_and_send_async` is called
        once per chunk. False here: it is called once, after the last chunk, with all pages."""
        return False

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
        if key not in self._sends:
            return False
        with self._arrived:
            return any(outcome.key == key for outcome in self._send_inbox)

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

    def respond_and_send_async(self, key: RequestKey, tokens: TokenRange, sources: Sequence[RankBlocks]) -> None:
        """Offers the pages of a finished prefill (blocks from token 0, every kernel that writes them has finished) and
        returns at once. They stay pinned until `check_context_transfer_status` returns the key."""
        self._check_usable(key)
        self._sends[key] = _InFlight()
        try:
            self._port.send(SendOffer(key, tokens, tuple(sources)))
        except BaseException:
            del self._sends[key]
            raise
        self._prepared.discard(key)

    def check_context_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0) -> list[SendOutcome]:
        """Offers that are over since the last call, in order; their pages may be freed.

        Waits up to `timeout_s` seconds for `at_least` of them, never for more than are in flight.
        """
        self._wait(self._send_inbox, min(at_least, len(self._sends)), timeout_s)
        outcomes = self._drain(self._send_inbox)
        for outcome in outcomes:
            self._end(self._sends, outcome.key)
        return outcomes

    # --- generation side

    def request_and_receive_async(self, request: ReceiveRequest) -> None:
        """Exposes pages to be written and returns at once. The receive is one whole slice; only the sender cuts."""
        self._check_usable(request.key)
        if request.key in self._prepared:
            raise TransferStateError(request.key, "is prepared as a context request")
        # Before publication can escape: an outcome must always find its request.
        self._receives[request.key] = _InFlight()
        try:
            self._port.send(request)
        except BaseException:
            del self._receives[request.key]
            raise

    def request_and_receive_sync(self, request: ReceiveRequest, deadline_s: float) -> ReceiveOutcome:
        """As `request_and_receive_async`, then waits for the first outcome of this key, at most `deadline_s` seconds.

        After the deadline the receive is cancelled and the answer is an unsettled TIMED_OUT; the settled outcome then
        comes through `check_gen_transfer_status`. Outcomes of other keys are left for that call.
        """
        self.request_and_receive_async(request)
        key, until = request.key, self._clock() + deadline_s
        with self._arrived:
            while (outcome := next((one for one in self._receive_inbox if one.key == key), None)) is None:
                left = until - self._clock()
                if left <= 0:
                    break
                self._arrived.wait(left)
            if outcome is not None:
                self._receive_inbox.remove(outcome)
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
        self._wait(self._receive_inbox, min(at_least, len(self._receives)), timeout_s)
        outcomes = self._drain(self._receive_inbox)
        for outcome in outcomes:
            self._apply_receive(outcome)
        return outcomes

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
        held = [table[key] for table in (self._sends, self._receives) if key in table]
        if not held:
            return True
        if not any(one.cancelled for one in held):
            self._port.send(CancelTransfer(key))
        for one in held:
            one.cancelled = True
        return False

    def shutdown(self) -> None:
        """Takes nothing new and withdraws all that is in flight. Their outcomes still come through check_*."""
        self._closed = True
        self._prepared.clear()
        for key in (*self._sends, *self._receives):
            self.cancel_request(key)

    def _check_usable(self, key: RequestKey) -> None:
        if self._closed:
            raise TransferStateError(key, "came after shutdown")
        if self.has_inflight_transfer(key):
            raise TransferStateError(key, "is in flight already: use a new attempt")

    def _wait(self, inbox: deque[SendOutcome] | deque[ReceiveOutcome], count: int, timeout_s: float) -> None:
        if count <= 0 or timeout_s <= 0:
            return
        until = self._clock() + timeout_s
        with self._arrived:
            while len({outcome.key for outcome in inbox}) < count and (left := until - self._clock()) > 0:
                self._arrived.wait(left)

    def _drain(self, inbox: deque[Outcome]) -> list[Outcome]:
        with self._arrived:
            outcomes = list(inbox)
            inbox.clear()
        return outcomes

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
