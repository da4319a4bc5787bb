"""What a transfer agent must do. Exactly one thread owns an agent: it makes it, registers, posts, polls, closes."""

from __future__ import annotations

from bisect import bisect_right
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


class Operation(Enum):
    """Which side of a transfer is remote: the destination of a WRITE, the source of a READ."""

    WRITE = 1
    READ = 2


class WriteState(Enum):
    """Where a posted transfer is."""

    IN_FLIGHT = 1
    # Every byte has arrived.
    DONE = 2
    # Not every byte has arrived and none will: the transfer is over.
    FAILED = 3


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """`reason` is set when FAILED. `peer_lost`: the peer or the way to it is gone, not only this transfer."""

    state: WriteState
    reason: str = ""
    peer_lost: bool = False


@dataclass(frozen=True, slots=True)
class AgentCapabilities:
    """What an agent can do in this process, found out when it was made.

    `engine`: library and version. `plugins`: what the library could load; `backends`: what it did load. `paths`: names
    of the ways bytes can take, of which `Agent.path` begins with one.
    """

    engine: str
    memory_kinds: frozenset[MemoryKind]
    paths: tuple[str, ...]
    plugins: tuple[str, ...] = ()
    backends: tuple[str, ...] = ()


class WriteHandle(Protocol):
    """One posted transfer. Opaque to all but the agent that made it."""

    @property
    def remote(self) -> str:
        """Name of the agent that owns the other side."""
        ...


class Agent(Protocol):
    """One-sided transfers between registered memory and the registered memory of named remote agents.

    Errors: AgentError for what this side did wrong or can not do, PeerLost when the peer is gone, AgentBroken when the
    agent can no longer tell whether posted transfers are over; then only the end of the process settles them.
    """

    @property
    def name(self) -> str:
        """Unique over time: host, pid and a random part."""
        ...

    @property
    def capabilities(self) -> AgentCapabilities:
        """What it can do here."""
        ...

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        """At least once, before `descriptor`; later calls add to it. The memory must not move while it is registered.
        Raises AgentError, also for a kind of memory that the agent lacks."""
        ...

    def deregister(self, regions: Sequence[RegisteredRegion]) -> None:
        """Takes back one `register`. No transfer may be open (AgentError). No fence: what peers have posted into the
        memory may still land, so it stays allocated until they are done."""
        ...

    def descriptor(self) -> AgentDescriptor:
        """What peers need for `load_remote`: describes what is registered now."""
        ...

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        """Makes a peer known and opens the connection, so that no request pays for it. Loading the same descriptor
        again does nothing. Raises AgentError, PeerLost."""
        ...

    def forget_remote(self, name: str) -> None:
        """Drops a peer; nothing when it is not known. No transfer with it may be open (AgentError)."""
        ...

    def check_remote(self, name: str, regions: Sequence[RegisteredRegion] = ()) -> bool:
        """True when the peer is loaded and memory in every one of the regions may be named. Says nothing about whether
        the peer lives."""
        ...

    def path(self, remote: str) -> str:
        """The way bytes take to a loaded peer, as far as it is known."""
        ...

    def submit(self, pairs: RegionPairs, remote: str, operation: Operation = Operation.WRITE) -> WriteHandle:
        """Posts one transfer of at least one run, from `pairs.src` to `pairs.dst`. Raises AgentError when nothing was
        posted; a post that fails half-way returns a handle that polls as FAILED."""
        ...

    def poll(self, handle: WriteHandle) -> WriteStatus:
        """Makes progress, never waits. Raises AgentBroken when the state can not be known any more."""
        ...

    def release(self, handle: WriteHandle) -> None:
        """Ends a handle of which the transfer is over (AgentError otherwise). Once per handle."""
        ...

    def notify(self, remote: str, message: bytes) -> None:
        """Sends a short message to a loaded peer, in order with other messages, unordered with transfers. Raises
        AgentError, PeerLost."""
        ...

    def notifications(self) -> list[tuple[str, bytes]]:
        """Messages that have arrived since the last call, with the name of the sender. Never waits."""
        ...

    def close(self) -> None:
        """Deregisters and ends the agent. No transfer may be open (AgentError). Idempotent."""
        ...


def refuse_kinds(regions: Sequence[RegisteredRegion], can: frozenset[MemoryKind], engine: str) -> None:
    """Raises AgentError naming the first kind of memory that the agent lacks, and those it has."""
    for region in regions:
        if region.memory_kind not in can:
            known = ", ".join(sorted(kind.name for kind in can))
            raise AgentError(f"{engine} can not register {region.memory_kind.name} memory here, only {known}")


class RegionIndex:
    """Registered regions of one side, sorted, for checking whole arrays of runs at once."""

    def __init__(self, regions: Sequence[RegisteredRegion], owner: str) -> None:
        """Raises AgentError when the list is empty."""
        if not regions:
            raise AgentError(f"{owner} registers no memory")
        ordered = sorted(regions, key=lambda region: region.base_address)
        self.owner = owner
        self.regions = tuple(ordered)
        self.kinds = frozenset(region.memory_kind for region in ordered)
        self._firsts = [region.base_address for region in ordered]
        self._starts = np.array([region.base_address for region in ordered], np.int64)
        self._ends = np.array([region.end for region in ordered], np.int64)
        self._devices = np.array([region.device_id for region in ordered], np.int64)
        self._kinds = np.array([region.memory_kind.value for region in ordered], np.int64)

    def devices(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> tuple[MemoryKind, NDArray[np.int64]]:
        """Kind of memory of all runs, and the device of each, int64[N]. Raises AgentError naming the first run outside
        one registered region, or when they lie in several kinds of memory: a transfer names one kind per side."""
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        wrong = np.flatnonzero((index < 0) | (addresses + lengths > self._ends[index]) | (lengths <= 0))
        if len(wrong):
            at = wrong[0]
            run = f"{int(addresses[at]):#x} + {int(lengths[at])}"
            raise AgentError(f"run {run} is not inside one registered region of {self.owner}")
        kind = self.regions[int(index[0])].memory_kind
        if len(self.kinds) > 1 and (self._kinds[index] != kind.value).any():
            raise AgentError(f"a transfer names memory of {self.owner} of several kinds: post one for each of them")
        return kind, self._devices[index]

    def device(self, address: int, length: int) -> tuple[MemoryKind, int]:
        """`devices` for one run, in less time."""
        index = bisect_right(self._firsts, address) - 1
        if index < 0 or length <= 0 or address + length > self.regions[index].end:
            raise AgentError(f"run {address:#x} + {length} is not inside one registered region of {self.owner}")
        return self.regions[index].memory_kind, self.regions[index].device_id

    def covers(self, regions: Sequence[RegisteredRegion]) -> bool:
        """True when every region lies inside one of these."""
        return all(
            any(one.base_address <= region.base_address and region.end <= one.end for one in self.regions)
            for region in regions
        )


def by_kind(regions: Sequence[RegisteredRegion]) -> dict[MemoryKind, list[RegisteredRegion]]:
    """The regions of each kind of memory, in order."""
    found: dict[MemoryKind, list[RegisteredRegion]] = {}
    for region in regions:
        found.setdefault(region.memory_kind, []).append(region)
    return found
