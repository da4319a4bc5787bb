"""Safety is not enough: what could have gone on must have gone on. Things that time alone may not end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.ports import TransferFailure

from .violation import Violation

if TYPE_CHECKING:
    from .attempt import Attempt
    from .node import Node

# Longer than any message and any notice takes without a fault.
FINE_S = 2.0


def check_timeout(attempt: Attempt, node: Node) -> None:
    """Violation when a receive times out although nothing has kept it from ending for a while: its prompt is computed,
    its stream is up, its writers run, and none has a write open. Whatever was lost should have been asked about."""
    target, now = attempt.target, node.world.now
    if target is None or target.writes or target.unheard or now - target.quiet_since < FINE_S:
        return
    for rank in node.ranks:
        # A late write of another request may keep the room that this one waits for, or have kept it until just now.
        if rank.alive and (node.core.chunks_in.granted_bytes(rank.number) or now - rank.port.room_since < FINE_S):
            return
    runs = all(rank.alive and rank.stalled_until < now - FINE_S for rank in attempt.context.ranks)
    if runs and _in_touch(attempt, node):
        raise Violation(f"{attempt.key} times out although nothing has been in its way for {FINE_S:g} s")


def check_intent_timeout(attempt: Attempt, node: Node) -> None:
    """The same for an intent of which the context leg has said all it has to say."""
    if attempt.sent in (None, TransferFailure.NONE) and _in_touch(attempt, node):
        raise Violation(f"the intent {attempt.key} times out although its context leg has been done for {FINE_S:g} s")


def check_expiry(attempt: Attempt, *, calm: bool) -> None:
    """Violation when pages are held until the hold runs out although their generation leg has ended. `calm`: there was
    no fault that could have kept a message from coming."""
    if calm and attempt.sent is TransferFailure.EXPIRED and attempt.told:
        raise Violation(f"the pages of {attempt.key} are held to the end although its generation leg is over")


def _in_touch(attempt: Attempt, node: Node) -> bool:
    """The prompt is computed, and ever since and for long enough the two instances could talk."""
    context, now = attempt.context, node.world.now
    peer = (context.name, context.incarnation)
    stream = node.links.get(peer)
    # A stream may have ended without this side's having noticed.
    if stream is None or not stream.open or stream.ready_at is None or not context.alive:
        return False
    last = max(stream.ready_at, node.partitioned.get(context.name, 0.0), attempt.computed or now)
    return now - last >= FINE_S
