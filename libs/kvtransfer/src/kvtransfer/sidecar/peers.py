"""Peers as requests name them: without a coordinator a decode learns of a prefill from its first request."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvtransfer.hub import PeerAddress

if TYPE_CHECKING:
    from kvtransfer.ports import Holder


class NamedPeers:
    """At most `limit` context instances, the most recently named ones. A restarted one replaces its predecessor."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._peers: OrderedDict[str, PeerAddress] = OrderedDict()

    def name(self, holder: Holder) -> tuple[PeerAddress, ...] | None:
        """The complete list when this holder changes it, None when it is known."""
        address = PeerAddress(holder.instance_id, holder.incarnation, holder.endpoint)
        known = self._peers.get(holder.instance_id)
        self._peers[holder.instance_id] = address
        self._peers.move_to_end(holder.instance_id)
        if known == address:
            return None
        while len(self._peers) > self._limit:
            self._peers.popitem(last=False)
        return tuple(self._peers.values())
