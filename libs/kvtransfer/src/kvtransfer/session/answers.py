"""What a context hub has said, for those who ask again: bounded, forgotten oldest first.

A KvRequest that is forgotten is still never started: its number is not above the highest one seen of its peer.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.session.transmit_attempt import never

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvtransfer.ports import RequestKey, TransferNotice
    from kvtransfer.session.actions import PeerId
    from kvtransfer.session.transmit_attempt import Attempt, Writer

_OPEN_FOR_IT = "an earlier request for the pages is open"
_OPEN_FOR_OTHER = "the pages were offered to another instance"


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of an attempt. `peer` None: nobody had asked. `offered` False: a tombstone, it was refused before it
    was offered. `lost`: the pages were not given up but could not be written."""

    peer: PeerId | None
    reason: str
    offered: bool
    lost: bool = False

    def explain(self, peer: PeerId) -> tuple[str, bool]:
        """Why `peer` does not get the pages, and whether that is because they are not held."""
        if self.peer is None:
            # Pages that died with their rank are a failed write, not a hold that ran out.
            return self.reason, not self.lost
        mine = "the pages have been handed off already: use a new attempt"
        return mine if self.peer == peer else _OPEN_FOR_OTHER, True


class Answers:
    """`limit` KvRequests with their notices and `limit` attempts, next to those that are `open`."""

    def __init__(self, limit: int, open_attempts: Mapping[RequestKey, Attempt]) -> None:
        self._limit, self._open = limit, open_attempts
        self._said: OrderedDict[tuple[PeerId, RequestKey, int], tuple[TransferNotice, ...]] = OrderedDict()
        self._ended: OrderedDict[RequestKey, Ended] = OrderedDict()
        self._highest: dict[PeerId, int] = {}

    def answer(
        self, peer: PeerId, key: RequestKey, receive: int, writers: Iterable[Writer], reason: str
    ) -> tuple[TransferNotice, ...]:
        """What is known of a KvRequest that is not to be started any more; `reason` when that is nothing."""
        attempt = self._open.get(key)
        if attempt is not None and attempt.peer == peer and attempt.receive == receive:
            return attempt.known
        said = self._said.get((peer, key, receive))
        if said is not None:
            return said
        if attempt is None or attempt.peer is not None:
            return self.not_held(peer, key, receive, writers, reason)
        notices = tuple(never(key, writer, reason, receive=receive) for writer in writers)
        self.record(peer, key, receive, notices)
        return notices

    def not_held(
        self, peer: PeerId, key: RequestKey, receive: int, writers: Iterable[Writer], reason: str
    ) -> tuple[TransferNotice, ...]:
        """Refuses a KvRequest for pages that are not there for it. Makes a tombstone when nothing is known of them."""
        attempt, ended, not_held = self._open.get(key), self._ended.get(key), True
        if attempt is not None:
            reason = _OPEN_FOR_IT if attempt.peer == peer else _OPEN_FOR_OTHER
        elif ended is not None:
            reason, not_held = ended.explain(peer)
        else:
            self.end(key, Ended(None, reason, offered=False))
        notices = tuple(never(key, writer, reason, receive=receive, not_held=not_held) for writer in writers)
        self.record(peer, key, receive, notices)
        return notices

    def record(self, peer: PeerId, key: RequestKey, receive: int, notices: tuple[TransferNotice, ...]) -> None:
        """A KvRequest is over, or will never be started."""
        self.seen(peer, receive)
        self._said[peer, key, receive] = notices
        while len(self._said) > self._limit:
            self._said.popitem(last=False)

    def seen(self, peer: PeerId, receive: int) -> None:
        """The peer has used that number, and with it all below."""
        self._highest[peer] = max(receive, self._highest.get(peer, 0))

    def is_old(self, peer: PeerId, receive: int) -> bool:
        """True when the peer has used that number before."""
        return 0 < receive <= self._highest.get(peer, 0)

    def end(self, key: RequestKey, ended: Ended) -> None:
        """An attempt is over, or was refused before it was offered."""
        self._ended[key] = ended
        self._ended.move_to_end(key)
        while len(self._ended) > self._limit:
            self._ended.popitem(last=False)

    def take_tombstone(self, key: RequestKey) -> Ended | None:
        """Forgets an attempt that is offered (again); what it was, when it was refused before."""
        ended = self._ended.pop(key, None)
        return None if ended is None or ended.offered else ended

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: nothing that it once sent can arrive any more."""
        self._highest.pop(peer, None)
