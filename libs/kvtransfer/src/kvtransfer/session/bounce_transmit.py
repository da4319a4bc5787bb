"""The context side of chunks: carries what ranks and peers say about them, and says again what a stream has lost.

rank ── ChunkReady ─▶ ASKED ── Grant ─▶ told to the rank
                      │   └── the peer reconciles ─▶ asked again; a Grant of nothing, with which the rank gives up the
                      │                              write, when its receive is over there
                      └── the attempt is over, the peer is forgotten ─▶ nobody waits
     BounceChunk ─▶ told to the peer, and again when it reconciles: the last word of its writer counts it
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtransfer.bounce_ports import ChunkReady, Grant
from kvtransfer.messages import ReceiveKey
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToRank

if TYPE_CHECKING:
    from kvtransfer.bounce_ports import BounceChunk, ChunkName, PeerWord
    from kvtransfer.ports import RequestKey

log = logging.getLogger(__name__)


class BounceTransmit:
    """All writers of one context instance; remembers the chunks of `max_remembered` KvRequests. `emit` must not call
    back."""

    def __init__(self, max_remembered: int, emit: Emit) -> None:
        self._emit, self._max_remembered = emit, max_remembered
        self._told: OrderedDict[tuple[PeerId, RequestKey, int], list[BounceChunk]] = OrderedDict()
        # With what was said, by peer and in order.
        self._asked: dict[PeerId, dict[ChunkName, ChunkReady]] = {}

    def rank_said(self, rank: int, word: PeerWord, *, ready: bool) -> None:
        """`ready`: there is a stream that the peer can be told on. Without one it is told when it reconciles."""
        peer = (word.instance_id, word.incarnation)
        if isinstance(word.body, ChunkReady):
            if word.body.name.src_rank != rank:
                log.warning("rank %d asks for a chunk of rank %d", rank, word.body.name.src_rank)
                return
            self._asked.setdefault(peer, {})[word.body.name] = word.body
        else:
            self._remember(peer, word.body)
        if ready:
            self._emit(ToPeer(peer, word.body))

    def granted(self, peer: PeerId, grant: Grant) -> None:
        """Room for a chunk. One that nobody waits for comes back with the last word of its writer."""
        if self._asked.get(peer, {}).pop(grant.name, None) is not None:
            self._emit(ToRank(grant.name.src_rank, grant))

    def reconcile(self, peer: PeerId, receives: Iterable[ReceiveKey]) -> None:
        """Says again which chunks of these KvRequests have been written, before anything else is said of them, and
        which wait for room: the question or its answer may be lost. There is no room for chunks of other KvRequests."""
        open_there = dict.fromkeys(receives)
        for one in open_there:
            for chunk in self._told.get((peer, one.key, one.receive), ()):
                self._emit(ToPeer(peer, chunk))
        for name, ready in list(self._asked.get(peer, {}).items()):
            if ReceiveKey(name.key, name.receive) in open_there:
                self._emit(ToPeer(peer, ready))
            else:
                self.granted(peer, Grant(name, 0, 0))

    def over(self, key: RequestKey) -> None:
        """An attempt has ended, and with it its writers: what a cancelled one had asked for is not wanted."""
        for asked in self._asked.values():
            for name in [one for one in asked if one.key == key]:
                del asked[name]

    def forget(self, peer: PeerId) -> None:
        """The peer is gone for good; it has no writers."""
        self._asked.pop(peer, None)

    def _remember(self, peer: PeerId, chunk: BounceChunk) -> None:
        which = (peer, chunk.name.key, chunk.name.receive)
        self._told.setdefault(which, []).append(chunk)
        self._told.move_to_end(which)
        if len(self._told) > self._max_remembered:
            self._told.popitem(last=False)
