"""The generation side of generation_first: legs that wait for a context leg which was started at the same time.

    intend ─▶ WAITING ── Bind ─▶ BOUND ── FirstTokens ─▶ over
                 └── NotBound, deadline, peer gone ────▶ over, failed

An intent names no pages. It is said again on every new stream until the first tokens have come: what was lost with the
old stream is said again by the context side.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.errors import ProtocolError, TransferStateError
from kvtransfer.messages import Cancel, KvIntent
from kvtransfer.ports import BindFailed, Bound, FirstTokensArrived, ReceiveIntent, TransferFailure
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToScheduler

if TYPE_CHECKING:
    from kvtransfer.config import TransferConfig
    from kvtransfer.ports import RequestKey

log = logging.getLogger(__name__)

_TOO_OLD = "instance {} does not start both legs at once; update it, or use context_first"


@dataclass(slots=True, eq=False)
class _Intent:
    wanted: ReceiveIntent
    peer: PeerId
    deadline: float
    dp_rank: int | None = None
    payload: bytes | None = None


class Intents:
    """All intents of one generation instance. `emit` must not call back."""

    def __init__(self, config: TransferConfig, emit: Emit) -> None:
        self._config, self._emit = config, emit
        self._open: dict[RequestKey, _Intent] = {}
        # True: the stream is ready and the peer speaks generation_first.
        self._ready: dict[PeerId, bool] = {}

    def intend(self, wanted: ReceiveIntent, now: float) -> None:
        """Says so as soon as the stream is ready. Raises TransferStateError for a key that waits already."""
        if wanted.key in self._open:
            raise TransferStateError(wanted.key, "waits for its context leg already")
        peer = (wanted.holder.instance_id, wanted.holder.incarnation)
        self._open[wanted.key] = _Intent(wanted, peer, now + self._config.timeout_s)
        if peer in self._ready:
            self._say(self._open[wanted.key])

    def withdraw(self, key: RequestKey) -> None:
        """The scheduler no longer waits; nothing more is said to it about the key."""
        intent = self._open.pop(key, None)
        if intent is not None:
            # Number 0: no KvRequest. One that was said is withdrawn by its own cancel.
            self._emit(ToPeer(intent.peer, Cancel(key, 0)))

    def stream_ready(self, peer: PeerId, speaks: bool) -> None:
        """A stream may be used; `speaks`: the peer starts both legs at once."""
        self._ready[peer] = speaks
        for intent in [one for one in self._open.values() if one.peer == peer]:
            self._say(intent)

    def stream_broke(self, peer: PeerId) -> None:
        """Intents are said again on the next one."""
        self._ready.pop(peer, None)

    def peer_gone(self, peer: PeerId, reason: str) -> None:
        """The peer will not bind any more."""
        for intent in [one for one in self._open.values() if one.peer == peer]:
            self._fail(intent, TransferFailure.PEER_LOST, reason)

    def bound(self, peer: PeerId, key: RequestKey, dp_rank: int) -> None:
        """Bind. A repeat changes nothing. Raises ProtocolError for another group: that would be a new attempt."""
        intent = self._of(peer, key)
        if intent is None or intent.dp_rank == dp_rank:
            return
        if intent.dp_rank is not None:
            raise ProtocolError(f"attempt {key} is bound to group {intent.dp_rank} and then to {dp_rank}")
        intent.dp_rank = dp_rank
        self._emit(ToScheduler(Bound(key, dp_rank)))
        if intent.payload is not None:
            self._deliver(intent)

    def not_bound(self, peer: PeerId, key: RequestKey, reason: str) -> None:
        """NotBound."""
        intent = self._of(peer, key)
        if intent is not None:
            self._fail(intent, TransferFailure.NOT_HELD, reason)

    def first_tokens(self, peer: PeerId, key: RequestKey, payload: bytes) -> None:
        """FirstTokens; a repeat changes nothing."""
        intent = self._of(peer, key)
        if intent is None:
            return
        intent.payload = payload
        # The Bind may have been lost with the old stream; it is said again in answer to the intent.
        if intent.dp_rank is not None:
            self._deliver(intent)

    def tick(self, now: float) -> None:
        """Intents of which nothing was heard in time fail."""
        for intent in [one for one in self._open.values() if now >= one.deadline]:
            what = "not bound" if intent.dp_rank is None else "no first token"
            self._emit(ToPeer(intent.peer, Cancel(intent.wanted.key, 0)))
            self._fail(intent, TransferFailure.TIMED_OUT, f"{what} after {self._config.timeout_s:g} s")

    @property
    def is_idle(self) -> bool:
        """True when nobody waits."""
        return not self._open

    def _of(self, peer: PeerId, key: RequestKey) -> _Intent | None:
        intent = self._open.get(key)
        if intent is None or intent.peer != peer:
            log.debug("news of %s about attempt %s is not waited for", peer[0], key)
            return None
        return intent

    def _say(self, intent: _Intent) -> None:
        if self._ready[intent.peer]:
            self._emit(ToPeer(intent.peer, KvIntent(intent.wanted.key, intent.wanted.trace)))
        else:
            self._fail(intent, TransferFailure.PEER_UNKNOWN, _TOO_OLD.format(intent.peer[0]))

    def _deliver(self, intent: _Intent) -> None:
        del self._open[intent.wanted.key]
        self._emit(ToScheduler(FirstTokensArrived(intent.wanted.key, intent.payload or b"")))

    def _fail(self, intent: _Intent, failure: TransferFailure, reason: str) -> None:
        del self._open[intent.wanted.key]
        self._emit(ToScheduler(BindFailed(intent.wanted.key, failure, reason)))
