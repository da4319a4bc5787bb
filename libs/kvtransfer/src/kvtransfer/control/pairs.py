"""A pair of instances, as the coordinator announces it and is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvtransfer.ports import Incompatibility
    from kvtransfer.session.actions import PeerId


class PairState(Enum):
    """As the coordinator is told. Values are those of `isthmus.v1.PairState`."""

    CONNECTING = 1
    READY = 2
    INCOMPATIBLE = 3


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A context instance as the coordinator announces it; `endpoint` is host:port of its hub."""

    instance_id: str
    incarnation: bytes
    endpoint: str


@dataclass(frozen=True, slots=True)
class PairStatus:
    """The pair of this generation instance and a context instance. `mine` in the reasons is the generation side's."""

    instance_id: str
    incarnation: bytes
    state: PairState
    incompatibilities: tuple[Incompatibility, ...] = ()


def choose(
    addresses: Sequence[PeerAddress],
    limit: int,
    mine: str,
    has_open: Callable[[PeerId], bool],
    last_used: Callable[[PeerId], float],
) -> list[PeerAddress]:
    """At most `limit` of the context instances to keep a stream to: those with open requests, then those that were
    asked last, then by lot. Every generation instance (`mine`) draws other lots, and the same ones again: a fleet
    spreads over all context instances, and one that comes or goes moves only the streams that it takes or leaves."""

    def rank(one: PeerAddress) -> tuple[bool, float, bytes]:
        peer = (one.instance_id, one.incarnation)
        lot = blake2b(one.instance_id.encode(), key=blake2b(mine.encode(), digest_size=32).digest(), digest_size=8)
        return not has_open(peer), -last_used(peer), lot.digest()

    return list(addresses) if len(addresses) <= limit else sorted(addresses, key=rank)[:limit]
