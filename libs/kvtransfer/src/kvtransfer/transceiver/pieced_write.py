"""One write to one remote agent, posted in pieces: a post may copy on the spot, and a cancel must be able to overtake.

rest ── post, at most DEPTH at once ──▶ in flight ── over ──▶ done | failed: the rest is dropped
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer import nvtx
from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.errors import AgentError, PeerLost
from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent, WriteHandle

# A copy through the kernel moves a piece in some 10 ms; a fabric does it in well below one, and a post costs far less.
PIECE_BYTES = 64 << 20
# One in flight while the next one is posted.
DEPTH = 2


class PiecedWrite:
    """Not thread-safe. Nothing is posted before `post`."""

    def __init__(self, agent: Agent, remote: str, pairs: RegionPairs, piece_bytes: int = PIECE_BYTES) -> None:
        self._agent, self._remote = agent, remote
        self._rest = deque(cut(pairs, piece_bytes))
        self._in_flight: list[WriteHandle] = []
        self._failure = ""
        self._peer_lost = False

    @property
    def can_post(self) -> bool:
        """True when a piece waits and may go."""
        return bool(self._rest) and len(self._in_flight) < DEPTH

    def post(self) -> None:
        """Posts the next piece. Raises AgentError when nothing of it was posted: the rest is dropped then."""
        piece = self._rest.popleft()
        try:
            with nvtx.span("kv.post"):
                self._in_flight.append(self._agent.submit(piece, self._remote))
        except AgentError as error:
            self._drop(str(error))
            self._peer_lost |= isinstance(error, PeerLost)
            raise

    def cancel(self, reason: str) -> None:
        """Posts no more. A write of which everything has been posted goes on as if nothing had happened."""
        if self._rest:
            self._drop(reason)

    def look(self) -> WriteStatus:
        """Makes progress. DONE: every byte has arrived. FAILED: not every byte, and no piece is in flight any more."""
        for handle in tuple(self._in_flight):
            status = self._agent.poll(handle)
            if status.state is WriteState.IN_FLIGHT:
                continue
            self._in_flight.remove(handle)
            self._agent.release(handle)
            if status.state is WriteState.FAILED:
                self._drop(status.reason)
                self._peer_lost |= status.peer_lost
        if self._in_flight or self._rest:
            return WriteStatus(WriteState.IN_FLIGHT)
        if self._failure:
            return WriteStatus(WriteState.FAILED, self._failure, self._peer_lost)
        return WriteStatus(WriteState.DONE)

    def _drop(self, reason: str) -> None:
        self._rest.clear()
        self._failure = self._failure or reason or "the agent gives no reason"


def cut(pairs: RegionPairs, piece_bytes: int) -> list[RegionPairs]:
    """The same runs in order, in parts of at most `piece_bytes` bytes; longer runs are divided."""
    if pairs.nbytes <= piece_bytes:
        return [pairs] if len(pairs) else []
    parts = -(-pairs.lengths // piece_bytes)
    which = np.repeat(np.arange(len(pairs)), parts)
    skip = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * piece_bytes
    lengths = np.minimum(piece_bytes, pairs.lengths[which] - skip)
    src, dst = pairs.src[which] + skip, pairs.dst[which] + skip
    ends = np.cumsum(lengths)
    pieces: list[RegionPairs] = []
    begin = 0
    while begin < len(ends):
        before = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, before + piece_bytes, side="right")))
        pieces.append(RegionPairs(src[begin:end], dst[begin:end], lengths[begin:end]))
        begin = end
    return pieces
