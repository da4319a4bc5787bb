"""An agent whose peers live in the same process: plain memory copies, in the order they were posted.

For tests and for planning without a fabric. It keeps the rules of real fabrics (registered regions, unique names, one
handle per write, no fence by deregistration) and can be told to misbehave as they do: land late or in another order,
never say that it landed, lose the bytes, fail half-way, lose the peer.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvtransfer.agents.base import (
    AgentCapabilities,
    Operation,
    RegionIndex,
    WriteHandle,
    WriteState,
    WriteStatus,
    refuse_kinds,
)
from kvtransfer.agents.naming import unique_agent_name
from kvtransfer.errors import AgentError, PeerLost
from kvtransfer.page_table import MemoryKind
from kvtransfer.rank_info import AgentDescriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs

BACKEND = PATH = "loopback"
MEMORY_KINDS = frozenset({MemoryKind.DRAM})


@dataclass(slots=True, eq=False)
class LoopbackWrite:
    """A posted write. `polls` counts down to the moment its bytes land; held writes wait for `LoopbackFabric.land`."""

    source: str
    remote: str
    pairs: RegionPairs
    polls: int
    fail: str
    held: bool
    # The bytes land or are lost; the writer never hears of it.
    silent: bool = False
    lost: bool = False
    status: WriteStatus = field(default_factory=lambda: WriteStatus(WriteState.IN_FLIGHT))
    released: bool = False


class LoopbackFabric:
    """The agents that can reach each other and the writes between them."""

    def __init__(self) -> None:
        self._agents: dict[str, LoopbackAgent] = {}
        self._open: list[LoopbackWrite] = []
        self._mail: dict[str, list[tuple[str, bytes]]] = {}

    def add(self, agent: LoopbackAgent) -> None:
        """Makes an agent reachable."""
        self._agents[agent.name] = agent

    def remove(self, name: str) -> None:
        """The agent's process is gone: later transfers with it lose their peer."""
        self._agents.pop(name, None)
        self._mail.pop(name, None)

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
        if write not in self._open or write.held:
            return
        if write.polls > 0:
            write.polls -= 1
            return
        self._finish(write)

    def land(self, order: Sequence[int] | None = None) -> int:
        """Lets held writes land, even those whose writer has died since. Returns how many.

        `order`: places among the held writes, oldest = 0, in the order of landing; those not named stay held. Default:
        all of them as they were posted. Raises AgentError for a place that there is not, or twice.
        """
        held = [write for write in self._open if write.held]
        places = range(len(held)) if order is None else order
        if len(set(places)) != len(places) or not set(places) <= set(range(len(held))):
            raise AgentError(f"order = {list(places)}: {len(held)} writes are held, name each at most once")
        for place in places:
            held[place].held = False
            self._finish(held[place])
        return len(places)

    def mail(self, sender: str, to: str, message: bytes) -> None:
        """Raises PeerLost when the receiver is gone."""
        self.find(to)
        self._mail.setdefault(to, []).append((sender, message))

    def take_mail(self, name: str) -> list[tuple[str, bytes]]:
        """What has arrived for an agent."""
        return self._mail.pop(name, [])

    @property
    def in_flight(self) -> int:
        """Posted writes that are not over."""
        return len(self._open)

    def _finish(self, write: LoopbackWrite) -> None:
        self._open.remove(write)
        if write.lost:
            return
        if write.remote not in self._agents:
            write.status = WriteStatus(WriteState.FAILED, f"agent {write.remote} is gone", peer_lost=True)
            return
        count = len(write.pairs) // 2 if write.fail else len(write.pairs)
        columns = (write.pairs.dst[:count], write.pairs.src[:count], write.pairs.lengths[:count])
        for dst, src, length in zip(*(column.tolist() for column in columns), strict=True):
            ctypes.memmove(dst, src, length)
        if write.silent:
            return
        failed = WriteStatus(WriteState.FAILED, write.fail)
        write.status = failed if write.fail else WriteStatus(WriteState.DONE)


# Where agents meet that are made by name.
DEFAULT_FABRIC = LoopbackFabric()


class LoopbackAgent:
    """See `agents.base.Agent`. `delay_polls`, `hold`, `fail_next` and `lose_next` script the writes posted from now
    on. `memory_kinds`: what it takes; all of it is copied as host memory."""

    memory_kinds = MEMORY_KINDS

    def __init__(self, label: str, fabric: LoopbackFabric = DEFAULT_FABRIC) -> None:
        self._name = unique_agent_name(label)
        self._fabric = fabric
        self._calls: list[tuple[RegisteredRegion, ...]] = []
        self._regions: RegionIndex | None = None
        self._remotes: dict[str, RegionIndex] = {}
        self._open: set[LoopbackWrite] = set()
        self.delay_polls = 0
        self.hold = False
        self._fail = ""
        self._silent = self._lost = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> AgentCapabilities:
        return AgentCapabilities("loopback", self.memory_kinds, (PATH,), (), (BACKEND,))

    def lose_next(self, *, landed: bool) -> None:
        """The next write is never over for this agent: its bytes land all the same (`landed`) or never."""
        self._silent, self._lost = landed, not landed

    def fail_next(self, reason: str) -> None:
        """The next write lands half of its runs and fails."""
        self._fail = reason

    def die(self) -> None:
        """As a killed process: unreachable from now on, and nothing it posted is called back; held writes may land."""
        self._fabric.remove(self._name)

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        refuse_kinds(regions, self.memory_kinds, BACKEND)
        self._regions = RegionIndex([one for call in (*self._calls, regions) for one in call], self._name)
        self._calls.append(tuple(regions))
        self._fabric.add(self)

    def deregister(self, regions: Sequence[RegisteredRegion]) -> None:
        if tuple(regions) not in self._calls:
            raise AgentError(f"agent {self._name} has not registered these {len(regions)} regions together")
        if any(write.status.state is WriteState.IN_FLIGHT for write in self._open):
            raise AgentError(f"agent {self._name} has open writes")
        self._calls.remove(tuple(regions))
        left = [one for call in self._calls for one in call]
        self._regions = RegionIndex(left, self._name) if left else None

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

    def check_remote(self, name: str, regions: Sequence[RegisteredRegion] = ()) -> bool:
        return name in self._remotes and self._remotes[name].covers(regions)

    def path(self, remote: str) -> str:
        self._known(remote)
        return PATH

    def submit(self, pairs: RegionPairs, remote: str, operation: Operation = Operation.WRITE) -> LoopbackWrite:
        far = self._known(remote)
        if self._regions is None or not len(pairs):
            raise AgentError(f"agent {self._name} has nothing to write" if self._regions else "no memory registered")
        src, dst = (self._regions, far) if operation is Operation.WRITE else (far, self._regions)
        src.devices(pairs.src, pairs.lengths)
        dst.devices(pairs.dst, pairs.lengths)
        write = LoopbackWrite(
            self._name, remote, pairs, self.delay_polls, self._fail, self.hold, self._silent, self._lost
        )
        self._fail, self._silent, self._lost = "", False, False
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

    def notify(self, remote: str, message: bytes) -> None:
        self._known(remote)
        self._fabric.mail(self._name, remote, message)

    def notifications(self) -> list[tuple[str, bytes]]:
        return self._fabric.take_mail(self._name)

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
