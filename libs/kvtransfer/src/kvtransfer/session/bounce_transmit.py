"""The context side of chunks: carries what ranks and peers say about them, and ends what a broken stream leaves open.

rank ── ChunkReady ─▶ ASKED ── Grant ─▶ told to the rank
                        └── the stream ends ─▶ a Grant of nothing: the rank gives up the write
     BounceChunk ─▶ told to the peer, and again when it reconciles: the last word of its writer counts it
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvtransfer.bounce_ports import ChunkReady, Grant
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToRank

if TYPE_CHECKING:
    from kvtransfer.bounce_ports import BounceChunk, ChunkName, PeerWord
    from kvtransfer.messages import ReceiveKey
    from kvtransfer.ports import RequestKey

log = logging.getLogger(__name__)


class BounceTransmit:
    """All writers of one context instance; remembers the chunks of `max_remembered` KvRequests. `emit` must not call
    back."""

    def __init__(self, max_remembered: int, emit: Emit) -> None:
        self._emit, self._max_remembered = emit, max_remembered
        self._told: OrderedDict[tuple[PeerId, RequestKey, int], list[BounceChunk]] = OrderedDict()
        self._asked: dict[PeerId, set[ChunkName]] = {}

    def rank_said(self, rank: int, word: PeerWord, *, ready: bool) -> None:
        """`ready`: there is a stream that the peer can be told on."""
        peer = (word.instance_id, word.incarnation)
        if isinstance(word.body, ChunkReady):
            if word.body.name.src_rank != rank:
                log.warning("rank %d asks for a chunk of rank %d", rank, word.body.name.src_rank)
                return
            if not ready:
                self._emit(ToRank(rank, Grant(word.body.name, 0, 0)))
                return
            self._asked.setdefault(peer, set()).add(word.body.name)
        else:
            self._remember(peer, word.body)
        if ready:
            self._emit(ToPeer(peer, word.body))

    def granted(self, peer: PeerId, grant: Grant) -> None:
        """Room for a chunk. One that nobody waits for comes back with the last word of its writer."""
        asked = self._asked.get(peer, set())
        if grant.name in asked:
            asked.discard(grant.name)
            self._emit(ToRank(grant.name.src_rank, grant))

    def reconcile(self, peer: PeerId, receives: Iterable[ReceiveKey]) -> None:
        """Says again which chunks of these KvRequests have been written, before anything else is said of them."""
        for one in receives:
            for chunk in self._told.get((peer, one.key, one.receive), ()):
                self._emit(ToPeer(peer, chunk))

    def _remember(self, peer: PeerId, chunk: BounceChunk) -> None:
        which = (peer, chunk.name.key, chunk.name.receive)
        self._told.setdefault(which, []).append(chunk)
        self._told.move_to_end(which)
        if len(self._told) > self._max_remembered:
            self._told.popitem(last=False)

    def stream_closed(self, peer: PeerId) -> None:
        """Grants may have been lost with the stream: what waits for one is told that none will come."""
        for name in self._asked.pop(peer, set()):
            self._emit(ToRank(name.src_rank, Grant(name, 0, 0)))
