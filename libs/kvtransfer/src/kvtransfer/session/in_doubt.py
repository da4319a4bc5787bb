"""Pages of failed receives whose writers do not answer: their hub is asked to kill them, then the pages leak, and
beyond a budget the instance stops. Time never frees anything here; it only decides whom to ask and when to give up.

    failed ── in_doubt_s ─▶ Fence ── asked FENCE_TRIES times in vain ─▶ leaked ── above the budget ─▶ StopInstance
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtransfer.session.actions import Emit, Fence, StopInstance
from kvtransfer.session.receive_attempt import FAILED

if TYPE_CHECKING:
    from kvtransfer.config import TransferConfig
    from kvtransfer.ledger import Ledger
    from kvtransfer.session.actions import PeerId
    from kvtransfer.session.receive_attempt import Attempt

log = logging.getLogger(__name__)

# A hub that is there kills and reaps a process in well below a second; the proof then needs the drain time.
FENCE_RETRY_S = 5.0
FENCE_TRIES = 2


class InDoubt:
    """One generation instance's suspects. `emit` must not call back."""

    def __init__(self, config: TransferConfig, ledger: Ledger, emit: Emit) -> None:
        self._config, self._ledger, self._emit = config, ledger, emit
        self._stopped = False
        self.leaked_bytes = 0

    def tick(self, attempts: Iterable[Attempt], now: float) -> None:
        """Looks at every open receive; `leaked_bytes` is right afterwards."""
        suspects: dict[PeerId, list[Attempt]] = {}
        leaked = 0
        for attempt in attempts:
            if attempt.state not in FAILED:
                continue
            if attempt.fence_at is None:
                attempt.fence_at = now + self._config.in_doubt_s
            if now >= attempt.fence_at and attempt.dead_at is None:
                suspects.setdefault(attempt.peer, []).append(attempt)
            if attempt.leaked:
                leaked += self._ledger.nbytes(attempt.key)
        for peer, due in suspects.items():
            leaked += self._suspect(peer, due, now)
        self.leaked_bytes = leaked
        if leaked > self._config.leak_budget_bytes and not self._stopped:
            self._stopped = True
            self._emit(StopInstance(self._too_much(leaked)))

    def writers_exited(self, attempt: Attempt, ranks: frozenset[int] | None, now: float) -> bool:
        """Proof that writers of a receive have exited (`ranks`, None for all). True when that is news."""
        known = attempt.dead_ranks
        if known is None or (ranks is not None and ranks <= known):
            return False
        attempt.dead_ranks = None if ranks is None else known | ranks
        attempt.dead_at = now + self._config.drain_s
        return True

    def settled_by_death(self, attempt: Attempt, now: float) -> bool:
        """True when the exited writers were the last ones and have drained."""
        if attempt.dead_at is None or now < attempt.dead_at:
            return False
        attempt.dead_at = None
        return self._ledger.prove_dead(attempt.key, attempt.peer[1], now, attempt.dead_ranks)

    def _suspect(self, peer: PeerId, due: list[Attempt], now: float) -> int:
        """Asks for a fence; bytes that leak from now on."""
        leaked = 0
        for attempt in due:
            attempt.fence_at = now + FENCE_RETRY_S
            attempt.fences += 1
            if not attempt.leaked and (attempt.fences > FENCE_TRIES or not self._config.fence_writer):
                attempt.leaked = True
                size = self._ledger.nbytes(attempt.key)
                leaked += size
                text = "%d bytes of request %s leak: instance %s neither finishes nor proves that its writers died"
                log.error(text, size, attempt.key, peer[0])
        if self._config.fence_writer:
            reason = f"writers of {len(due)} requests have said nothing for {self._config.in_doubt_s:g} s after the end"
            receives = tuple(attempt.name for attempt in due)
            self._emit(Fence(peer, due[0].request.holder.endpoint, receives, reason))
        return leaked

    def _too_much(self, leaked: int) -> str:
        return (
            f"{leaked} bytes of KV cache may still be written by peers that can not be reached, more than "
            f"transfer.leak_budget_bytes = {self._config.leak_budget_bytes}: this instance stops to get its memory back"
        )
