"""Receive sessions whose writers may bounce: a last word waits until the chunks it counts have been scattered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.messages import ReceiveKey, ReconcileReply
from kvtransfer.session.receive import ReceiveSessions
from kvtransfer.session.receive_attempt import FAILED

if TYPE_CHECKING:
    from collections.abc import Iterable

    from isthmus_core.tracing import Tracing
    from kvtransfer.config import TransferConfig
    from kvtransfer.ledger import Ledger
    from kvtransfer.ports import TransferNotice
    from kvtransfer.session.actions import Emit, PeerId
    from kvtransfer.session.bounce_receive import BounceReceive


class BouncedReceives(ReceiveSessions):
    """See `ReceiveSessions`. `bounce` is asked about every last word before it counts, also about one that comes with a
    ReconcileReply or a fence."""

    def __init__(
        self, config: TransferConfig, ledger: Ledger, emit: Emit, tracing: Tracing, bounce: BounceReceive
    ) -> None:
        super().__init__(config, ledger, emit, tracing)
        self._bounce, self._final = bounce, False

    def notice(self, peer: PeerId, notice: TransferNotice, now: float) -> None:
        attempt = self._open.get(notice.key)
        final = self._final or (attempt is not None and attempt.state in FAILED)
        told = self._bounce.screen(peer, notice, final=final)
        if told is not None:
            super().notice(peer, told, now)

    def last_notices(self, peer: PeerId, notices: Iterable[TransferNotice], now: float) -> None:
        """Words after which nothing more can come of these writers."""
        self._final = True
        try:
            for notice in notices:
                self.notice(peer, notice, now)
        finally:
            self._final = False

    def reconciled(self, peer: PeerId, reply: ReconcileReply, now: float) -> None:
        """Chunks that were lost have been said again before the reply. What waits for scatters is not in doubt any
        more: it counts as in flight."""
        self.last_notices(peer, reply.notices, now)
        waits = tuple(
            ReceiveKey(one.key, one.receive)
            for one in reply.notices
            if self._bounce.screen(peer, one, final=True) is None
        )
        super().reconciled(peer, ReconcileReply((*reply.in_flight, *waits), ()), now)
