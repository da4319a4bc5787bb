"""Planted bugs of chunks. See planted.py."""
# pyright: basic, reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import pytest

from kvtransfer.bounce_ports import ChunkReady
from kvtransfer.session.bounce_receive import BounceReceive
from kvtransfer.session.bounce_transmit import BounceTransmit

from .planted import planted


@planted
def outcome_does_not_wait_for_scatters(patch: pytest.MonkeyPatch) -> None:
    """Pages are given away while a chunk is copied into them."""
    original = BounceReceive.hold

    def hold(self, outcome):
        original(self, outcome)
        return False

    patch.setattr(BounceReceive, "hold", hold)


@planted
def delivered_does_not_wait_for_scatters(patch: pytest.MonkeyPatch) -> None:
    """A request is decoded from pages that its chunks have not reached."""
    original = BounceReceive.screen

    def screen(self, peer, notice, *, final=False):
        original(self, peer, notice, final=final)
        return notice

    patch.setattr(BounceReceive, "screen", screen)


@planted
def grant_comes_back_with_the_failure(patch: pytest.MonkeyPatch) -> None:
    """Room is granted to somebody else when a receive fails, before its writers are over."""
    original = BounceReceive.hold

    def hold(self, outcome):
        receive = self._receives.get(outcome.key)
        if receive is not None and not outcome.settled:
            for pair in set(receive.writers):
                self._take_back(receive, pair)
        return original(self, outcome)

    patch.setattr(BounceReceive, "hold", hold)


@planted
def waiting_chunks_are_forgotten_with_the_stream(patch: pytest.MonkeyPatch) -> None:
    """A writer waits for room that it has asked for, or was granted, on a stream that has broken."""
    reconciles, says = BounceTransmit.reconcile, BounceTransmit.rank_said

    def reconcile(self, peer, receives):
        self._asked.pop(peer, None)
        reconciles(self, peer, receives)

    def rank_said(self, rank, word, *, ready):
        if ready or not isinstance(word.body, ChunkReady):
            says(self, rank, word, ready=ready)

    patch.setattr(BounceTransmit, "reconcile", reconcile)
    patch.setattr(BounceTransmit, "rank_said", rank_said)
