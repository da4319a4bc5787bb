"""Planted bugs of chunks. See planted.py."""
# pyright: basic, reportAttributeAccessIssue=false, reportPrivateUsage=false

from __future__ import annotations

import pytest

from kvtransfer.bounce_ports import ChunkReady, Grant
from kvtransfer.session.bounce_receive import BounceReceive
from kvtransfer.session.bounce_transmit import BounceTransmit
from kvtransfer.transceiver.bounced_write import BouncedWrite
from kvtransfer.transceiver.bouncing import Bouncing

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


@planted
def a_dropped_chunk_keeps_its_room(patch: pytest.MonkeyPatch) -> None:
    """What a failed or cancelled write has taken for chunks that it does not send is not given back."""

    def drop(self, reason):
        self._failure = self._failure or reason
        self._rest.clear()
        self._asked.clear()
        for name in [one.name for one in self._under_way.values() if one.copy is None]:
            del self._under_way[name]

    patch.setattr(BouncedWrite, "_drop", drop)


@planted
def a_small_grant_takes_the_whole_chunk(patch: pytest.MonkeyPatch) -> None:
    """A chunk that is gathered is written whole, however much of it there is room for at the peer."""
    original = BouncedWrite.granted

    def granted(self, grant):
        chunk = self._under_way.get(grant.name) or self._asked.get(grant.name)
        if chunk is not None and grant.nbytes > 0:
            grant = Grant(grant.name, grant.offset, chunk.end - chunk.begin)
        original(self, grant)

    patch.setattr(BouncedWrite, "granted", granted)


@planted
def lists_of_an_earlier_receive_are_kept(patch: pytest.MonkeyPatch) -> None:
    """What was prepared for a receive serves the next one of the same attempt, which has other pages."""
    original = Bouncing._packed_of

    def packed_of(self, part, peer, tokens, destinations):
        name = part.name.__class__(part.name.key, 0, part.name.src_rank, part.name.dst_rank, part.name.seq)
        return original(self, part._replace(name=name), peer, tokens, destinations)

    patch.setattr(Bouncing, "_packed_of", packed_of)
