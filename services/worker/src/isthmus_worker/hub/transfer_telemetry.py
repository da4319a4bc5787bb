"""Metrics and timeline entries of hand-offs, from what passes through the hub anyway. Its spans are kvtransfer's."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

from isthmus_core.metrics import workers as metric
from isthmus_core.metrics.loop_reader import read_on_loop
from isthmus_worker.hub.timelines import Entry
from isthmus_worker.marks import MarkKind
from kvtransfer.ports import ReceiveOutcome, SendOutcome, TransferFailure, TransferNotice, WriterOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from isthmus_worker.hub.leg_telemetry import LegTelemetry
    from kvtransfer.hub import PairStatus
    from kvtransfer.messages import SessionView
    from kvtransfer.ports import HubToScheduler, RequestKey, TransferStats

logger = logging.getLogger(__name__)

# Ways that the log tells when they are first used; those with one of these words are far slower than the hardware.
_MAX_PATHS = 16
_SLOW = ("tcp", "host staging")
_PHASES = ("queue", "plan", "gather", "post", "wire", "scatter")


class TransferTelemetry:
    """Of one instance. One event loop owns it."""

    def __init__(self, legs: LegTelemetry) -> None:
        self._legs, self._metrics = legs, legs.metrics
        # Failed receives of which the second outcome, that their pages are settled, is still to come.
        self._unsettled: set[RequestKey] = set()
        self._pairs: dict[str, str] = {}
        self._paths: set[str] = set()

    def watch(self, pages: Callable[[], Mapping[str, int]], sessions: Callable[[], Iterable[SessionView]]) -> None:
        """Pages by state, and the sessions in doubt, whenever metrics are collected. Needs a running event loop."""
        if not self._metrics.enabled:
            return

        def by_state() -> dict[tuple[str, ...], float]:
            return {(state,): float(count) for state, count in pages().items()}

        def oldest() -> float:
            return max((one.age for one in sessions() if one.in_doubt), default=0.0)

        def peers() -> dict[tuple[str, ...], float]:
            return {(state,): float(count) for state, count in Counter(self._pairs.values()).items()}

        self._metrics.observe(metric.LEDGER_PAGES, read_on_loop(by_state, {}))
        self._metrics.observe(metric.IN_DOUBT_AGE, read_on_loop(oldest, 0.0))
        self._metrics.observe(metric.PEERS, read_on_loop(peers, {}))

    def set_peers(self, instance_ids: Iterable[str]) -> None:
        """The complete list of peers: those that are gone are no longer counted."""
        known = set(instance_ids)
        self._pairs = {name: state for name, state in self._pairs.items() if name in known}

    def pair(self, status: PairStatus) -> None:
        """A pair has changed."""
        state = status.state.name.lower()
        if self._pairs.get(status.instance_id) == "ready" and state != "ready":
            self._metrics.add(metric.STREAM_BREAKS, 1)
        self._pairs[status.instance_id] = state

    def to_scheduler(self, message: HubToScheduler) -> None:
        """What the hub tells the engine about a hand-off."""
        match message:
            case ReceiveOutcome():
                self._received(message)
            case SendOutcome(failure=failure):
                self._metrics.add(metric.OFFERS, 1, _outcome(failure))
            case _:
                return

    def _received(self, outcome: ReceiveOutcome) -> None:
        key = outcome.key
        if key in self._unsettled:
            if outcome.settled:
                self._unsettled.discard(key)
            return
        if not outcome.settled:
            self._unsettled.add(key)
        name = _outcome(outcome.failure)
        self._metrics.add(metric.HANDOFFS, 1, name)
        delivered = outcome.failure is TransferFailure.NONE
        self._legs.handoff_ended(key, "" if delivered else outcome.reason or name)
        stats = outcome.stats
        if stats is not None and stats.writers.scatter:
            # The other parts of a write are counted where it is written.
            self._metrics.record(metric.TRANSFER_TIME, stats.writers.scatter, stats.writers.path, "scatter")
        timeline = self._legs.timelines.get(key)
        if timeline is not None:
            took_ns = 0 if stats is None else round(stats.total * 1e9)
            writers = None if stats is None else stats.writers
            begin_ns = time.time_ns() - took_ns
            entry = Entry(MarkKind.RECEIVE, begin_ns, took_ns, stats=writers, outcome=name, reason=outcome.reason)
            timeline.note(entry)

    def notice(self, notice: TransferNotice) -> None:
        """A rank of this instance is done with a write."""
        stats, outcome = notice.stats, notice.outcome.name.lower()
        mode = "bounced" if stats.bounced else "direct"
        self._metrics.add(metric.TRANSFERS, 1, stats.path or "none", mode, outcome)
        timeline = self._legs.timelines.get(notice.key)
        if timeline is not None:
            took_ns = round((stats.plan + stats.wire) * 1e9)
            ranks = (notice.src_rank, notice.dst_rank)
            begin_ns = time.time_ns() - took_ns
            entry = Entry(
                MarkKind.TRANSFER,
                begin_ns,
                took_ns,
                ranks=ranks,
                stats=stats,
                outcome=outcome,
                reason=notice.reason,
            )
            timeline.note(entry)
        if notice.outcome is WriterOutcome.DELIVERED and stats.bytes:
            self._delivered(stats)

    def _delivered(self, stats: TransferStats) -> None:
        metrics, path = self._metrics, stats.path or "none"
        if path not in self._paths and len(self._paths) < _MAX_PATHS:
            self._paths.add(path)
            slow = any(word in path for word in _SLOW)
            logger.log(logging.WARNING if slow else logging.INFO, "caches move over %s", path, extra={"path": path})
        if direct := stats.bytes - stats.bounced:
            metrics.add(metric.TRANSFER_BYTES, direct, path, "direct")
        if stats.bounced:
            metrics.add(metric.TRANSFER_BYTES, stats.bounced, path, "bounced")
        metrics.add(metric.TRANSFER_DESCRIPTORS, stats.descriptors, path)
        for phase in _PHASES:
            if seconds := getattr(stats, phase, 0.0):
                metrics.record(metric.TRANSFER_TIME, seconds, path, phase)
        if stats.wire:
            metrics.record(metric.TRANSFER_RATE, stats.bytes / stats.wire, path)
        if stats.predicted:
            measured = stats.queue + stats.plan + stats.wire
            metrics.record(metric.COST_ERROR, measured / stats.predicted, "bounced" if stats.bounced else "direct")


def _outcome(failure: TransferFailure) -> str:
    return "delivered" if failure is TransferFailure.NONE else failure.name.lower()
