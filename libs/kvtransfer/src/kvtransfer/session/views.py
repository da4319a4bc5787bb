"""Open attempts as ListSessions shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.messages import SessionView
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.receive_attempt import IN_DOUBT

if TYPE_CHECKING:
    from kvtransfer.session import receive_attempt, transmit_attempt


def transmit_view(attempt: transmit_attempt.Attempt, now: float) -> SessionView:
    """Context side."""
    return SessionView(
        key=attempt.key,
        side=InstanceRole.CONTEXT,
        state=attempt.state.name.lower(),
        peer_instance_id="" if attempt.peer is None else attempt.peer[0],
        age=now - attempt.since,
        pages=attempt.pages,
        in_doubt=False,
    )


def receive_view(attempt: receive_attempt.Attempt, pages: int, now: float) -> SessionView:
    """Generation side."""
    return SessionView(
        key=attempt.request.key,
        side=InstanceRole.GENERATION,
        state=attempt.state.name.lower(),
        peer_instance_id=attempt.peer[0],
        age=now - attempt.since,
        pages=pages,
        in_doubt=attempt.state in IN_DOUBT,
    )
