"""What a transfer agent must do. Exactly one thread owns an agent: it makes it, registers, posts, polls, closes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kvtransfer.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import MemoryKind, RegisteredRegion
    from kvtransfer.rank_info import AgentDescriptor
    from kvtransfer.regions import RegionPairs


class WriteState(Enum):
    """Where a posted write is."""

    IN_FLIGHT = 1
    # Every byte has arrived.
    DONE = 2
    # Not every byte has arrived and none will: the write is over.
    FAILED = 3


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """`reason` is set when FAILED. `peer_lost`: the peer or the way to it is gone, not only this write."""

    state: WriteState
    reason: str = ""
    peer_lost: bool = False


class WriteHandle(Protocol):
    """One posted write. Opaque to all but the agent that made it."""

    @property
    def remote(self) -> str:
        """Name of the agent that owns the destination."""
        ...


class Agent(Protocol):
    """One-sided writes from registered memory into the registered memory of named remote agents.

    Errors: AgentError for what this side did wrong or can not do, PeerLost when the peer is gone, AgentBroken when the
    agent can no longer tell whether posted writes are over; then only the end of the process settles them.
    """

    @property
    def name(self) -> str:
        """Unique over time: host, pid and a random part."""
        ...

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        """Once, before `descriptor`. The memory must not move and must outlive the agent. Raises AgentError."""
        ...

    def descriptor(self) -> AgentDescriptor:
        """What peers need for `load_remote`."""
        ...

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        """Makes a peer known and opens the connection, so that no request pays for it. Loading the same descriptor
        again does nothing. Raises AgentError, PeerLost."""
        ...

    def forget_remote(self, name: str) -> None:
        """Drops a peer; nothing when it is not known. No write to it may be open (AgentError)."""
        ...

    def path(self, remote: str) -> str:
        """The way bytes take to a loaded peer, as far as it is known."""
        ...

    def submit(self, pairs: RegionPairs, remote: str) -> WriteHandle:
        """Posts one write of at least one run. Raises AgentError when nothing was posted; a post that fails half-way
        returns a handle that polls as FAILED."""
        ...

    def poll(self, handle: WriteHandle) -> WriteStatus:
        """Makes progress, never waits. Raises AgentBroken when the state can not be known any more."""
        ...

    def release(self, handle: WriteHandle) -> None:
        """Ends a handle of which the write is over (AgentError otherwise). Once per handle."""
        ...

    def close(self) -> None:
        """Deregisters and ends the agent. No write may be open (AgentError). Idempotent."""
        ...


class RegionIndex:
    """Registered regions of one side, sorted, for checking whole arrays of runs at once."""

    def __init__(self, regions: Sequence[RegisteredRegion], owner: str) -> None:
        """Raises AgentError when the list is empty or mixes kinds of memory: one write names one kind per side."""
        if not regions:
            raise AgentError(f"{owner} registers no memory")
        kinds = {region.memory_kind for region in regions}
        if len(kinds) > 1:
            names = ", ".join(sorted(kind.name for kind in kinds))
            raise AgentError(f"{owner} registers {names} memory together; one rank keeps its cache in one kind")
        ordered = sorted(regions, key=lambda region: region.base_address)
        self.owner = owner
        self.regions = tuple(ordered)
        self.memory_kind: MemoryKind = ordered[0].memory_kind
        self._starts = np.array([region.base_address for region in ordered], np.int64)
        self._ends = np.array([region.end for region in ordered], np.int64)
        self._devices = np.array([region.device_id for region in ordered], np.int64)

    def devices(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Device of every run, int64[N]. Raises AgentError naming the first run outside one registered region."""
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        wrong = np.flatnonzero((index < 0) | (addresses + lengths > self._ends[index]) | (lengths <= 0))
        if len(wrong):
            at = wrong[0]
            run = f"{int(addresses[at]):#x} + {int(lengths[at])}"
            raise AgentError(f"run {run} is not inside one registered region of {self.owner}")
        return self._devices[index]
