"""A pair of instances, as the coordinator announces it and is told about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.ports import Incompatibility


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
