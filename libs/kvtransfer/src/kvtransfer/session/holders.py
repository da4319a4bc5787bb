"""What a generation instance knows of the context instances: terms, refusals, pages kept for one more request."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.messages import TransferLimits
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import RequestKey
    from kvtransfer.session.actions import PeerId


@dataclass(frozen=True, slots=True)
class ReceivePeer:
    """What is agreed with a context instance: who writes what, and how much may be asked for."""

    plans: tuple[PeerPlan, ...]
    limits: TransferLimits
    reconciles: bool


class Holders:
    """Context instances that are announced, and up to `limit` keys whose pages one of them keeps."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # None: known, but the stream is not ready.
        self._terms: dict[PeerId, ReceivePeer | None] = {}
        self._refused: dict[PeerId, str] = {}
        self._used: dict[PeerId, float] = {}
        self._kept: OrderedDict[RequestKey, tuple[PeerId, int]] = OrderedDict()
        self._owed: OrderedDict[RequestKey, tuple[PeerId, int]] = OrderedDict()

    def announce(self, peer: PeerId) -> None:
        """May be asked, as soon as its stream is ready."""
        self._terms.setdefault(peer, None)
        self._refused.pop(peer, None)

    def refuse(self, peer: PeerId, reason: str) -> None:
        """May not be asked, for that reason."""
        self._refused[peer] = reason

    def drop(self, peer: PeerId) -> None:
        """Not announced any more."""
        for known in (self._terms, self._refused, self._used):
            known.pop(peer, None)

    def ready(self, peer: PeerId, terms: ReceivePeer | None) -> None:
        """Its stream is ready, or no longer (None)."""
        if peer in self._terms:
            self._terms[peer] = terms

    def terms(self, peer: PeerId) -> ReceivePeer | None:
        """None when its stream is not ready."""
        return self._terms.get(peer)

    def problem(self, peer: PeerId) -> str:
        """Why the peer may not be asked; empty when it may."""
        if peer in self._terms:
            return ""
        return self._refused.get(peer, f"no stream to instance {peer[0]}, incarnation {peer[1].hex()}")

    def use(self, peer: PeerId, now: float) -> None:
        """The peer is being asked."""
        self._used[peer] = now

    def last_used(self, peer: PeerId) -> float:
        """When the peer was asked last; minus infinity for never."""
        return self._used.get(peer, float("-inf"))

    def keep(self, key: RequestKey, peer: PeerId, receive: int) -> None:
        """The peer keeps its pages for one more KvRequest. What is forgotten is freed by the peer's own deadline."""
        self._kept[key] = (peer, receive)
        self._bound(self._kept)

    def take_kept(self, key: RequestKey) -> tuple[PeerId, int] | None:
        """Who keeps pages for the key, and the KvRequest that failed; once."""
        return self._kept.pop(key, None)

    def owe(self, peer: PeerId, key: RequestKey, receive: int) -> None:
        """The peer is to hear that the key is not wanted any more, as soon as its stream is ready."""
        self._owed[key] = (peer, receive)
        self._bound(self._owed)

    def forgive(self, key: RequestKey) -> None:
        """The key is wanted again."""
        self._owed.pop(key, None)

    def take_owed(self, peer: PeerId) -> list[tuple[RequestKey, int]]:
        """What the peer is to hear now, once."""
        owed = [(key, receive) for key, (whom, receive) in self._owed.items() if whom == peer]
        for key, _ in owed:
            del self._owed[key]
        return owed

    def _bound(self, table: OrderedDict[RequestKey, tuple[PeerId, int]]) -> None:
        while len(table) > self._limit:
            table.popitem(last=False)
