"""An agent whose peers live in the same process: plain memory copies, in the order they were posted.

For tests and for planning without a fabric. It keeps the rules of real fabrics (registered regions, unique names, one
handle per write) and can be told to misbehave as they do: land late, fail half-way, lose the peer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.agents.base import RegionIndex, WriteHandle, WriteState, WriteStatus
from kvtransfer.agents.naming import unique_agent_name
from kvtransfer.errors import AgentError, PeerLost
from kvtransfer.rank_info import AgentDescriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs

BACKEND = "loopback"


@dataclass(slots=True, eq=False)
class LoopbackWrite:
    """A posted write. `polls` counts down to the moment its bytes land; held writes wait for `LoopbackFabric.land`."""

    source: str
    remote: str
    pairs: RegionPairs
    polls: int
    fail: str
    held: bool
    status: WriteStatus = field(default_factory=lambda: WriteStatus(WriteState.IN_FLIGHT))
    released: bool = False


class LoopbackFabric:
    """The agents that can reach each other and the writes between them."""

    def __init__(self) -> None:
        self._agents: dict[str, LoopbackAgent] = {}
        self._open: list[LoopbackWrite] = []

    def add(self, agent: LoopbackAgent) -> None:
        """Makes an agent reachable."""
        self._agents[agent.name] = agent

    def remove(self, name: str) -> None:
        """The agent's process is gone: later writes to it lose their peer."""
        self._agents.pop(name, None)

    def find(self, name: str) -> LoopbackAgent:
        """Raises PeerLost when the agent is gone or was never here."""
        try:
            return self._agents[name]
        except KeyError:
            raise PeerLost(f"no loopback agent {name!r} in this process") from None

    def post(self, write: LoopbackWrite) -> None:
        """Takes a checked write."""
        self._open.append(write)

    def step(self, write: LoopbackWrite) -> None:
        """One poll's worth of progress."""
        if write.status.state is not WriteState.IN_FLIGHT or write.held:
            return
        if write.polls > 0:
            write.polls -= 1
            return
        self._finish(write)

    def land(self) -> int:
        """Lets every held write land, in order, even those whose writer has died since. Returns how many."""
        held = [write for write in self._open if write.held]
        for write in held:
            write.held = False
            self._finish(write)
        return len(held)

    @property
    def in_flight(self) -> int:
        """Posted writes that are not over."""
        return len(self._open)

    def _finish(self, write: LoopbackWrite) -> None:
        self._open.remove(write)
        if write.remote not in self._agents:
            write.status = WriteStatus(WriteState.FAILED, f"agent {write.remote} is gone", peer_lost=True)
            return
        count = len(write.pairs) // 2 if write.fail else len(write.pairs)
        columns = (write.pairs.dst[:count], write.pairs.src[:count], write.pairs.lengths[:count])
        for dst, src, length in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(dst, src, length)
        failed = WriteStatus(WriteState.FAILED, write.fail)
        write.status = failed if write.fail else WriteStatus(WriteState.DONE)


# Where agents meet that are made by name.
DEFAULT_FABRIC = LoopbackFabric()


class LoopbackAgent:
    """See `agents.base.Agent`. `delay_polls`, `hold` and `fail_next` script the writes posted from now on."""

    def __init__(self, label: str, fabric: LoopbackFabric = DEFAULT_FABRIC) -> None:
        self._name = unique_agent_name(label)
        self._fabric = fabric
        self._regions: RegionIndex | None = None
        self._remotes: dict[str, RegionIndex] = {}
        self._open: set[LoopbackWrite] = set()
        self.delay_polls = 0
        self.hold = False
        self._fail = ""

    @property
    def name(self) -> str:
        return self._name

    def fail_next(self, reason: str) -> None:
        """The next write lands half of its runs and fails."""
        self._fail = reason

    def die(self) -> None:
        """As a killed process: unreachable from now on, and nothing it posted is called back; held writes may land."""
        self._fabric.remove(self._name)

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        if self._regions is not None:
            raise AgentError(f"agent {self._name} has registered its memory already")
        self._regions = RegionIndex(regions, self._name)
        self._fabric.add(self)

    def descriptor(self) -> AgentDescriptor:
        if self._regions is None:
            raise AgentError(f"agent {self._name} has not registered any memory")
        return AgentDescriptor(BACKEND, self._name, b"")

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        if remote.backend != BACKEND:
            raise AgentError(f"agent {remote.name} speaks {remote.backend!r}, not {BACKEND!r}")
        self._fabric.find(remote.name)
        self._remotes[remote.name] = RegionIndex(regions, remote.name)

    def forget_remote(self, name: str) -> None:
        if any(write.remote == name for write in self._open):
            raise AgentError(f"a write to agent {name} is open")
        self._remotes.pop(name, None)

    def path(self, remote: str) -> str:
        self._known(remote)
        return "loopback"

    def submit(self, pairs: RegionPairs, remote: str) -> LoopbackWrite:
        destination = self._known(remote)
        if self._regions is None or not len(pairs):
            raise AgentError(f"agent {self._name} has nothing to write" if self._regions else "no memory registered")
        self._regions.devices(pairs.src, pairs.lengths)
        destination.devices(pairs.dst, pairs.lengths)
        write = LoopbackWrite(self._name, remote, pairs, self.delay_polls, self._fail, self.hold)
        self._fail = ""
        self._open.add(write)
        self._fabric.post(write)
        return write

    def poll(self, handle: WriteHandle) -> WriteStatus:
        write = self._mine(handle)
        self._fabric.step(write)
        return write.status

    def release(self, handle: WriteHandle) -> None:
        write = self._mine(handle)
        if write.status.state is WriteState.IN_FLIGHT:
            raise AgentError(f"a write to agent {write.remote} is not over")
        write.released = True
        self._open.discard(write)

    def close(self) -> None:
        if any(write.status.state is WriteState.IN_FLIGHT for write in self._open):
            raise AgentError(f"agent {self._name} has open writes")
        self._fabric.remove(self._name)

    def _known(self, remote: str) -> RegionIndex:
        try:
            return self._remotes[remote]
        except KeyError:
            raise AgentError(f"agent {remote!r} has not been loaded") from None

    def _mine(self, handle: WriteHandle) -> LoopbackWrite:
        if not isinstance(handle, LoopbackWrite) or handle.released or handle.source != self._name:
            raise AgentError("not an open write of this agent")
        return handle
