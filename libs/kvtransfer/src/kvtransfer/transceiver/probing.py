"""Measuring a pair: real bytes from this rank's scratch memory to the peer's, over the agent that carries the cache.

begin ─▶ small ─▶ small … ─▶ large, large ─▶ many runs ─▶ next rank ─▶ … ─▶ done(results)
   └──────────────── a failure or the deadline ────────▶ next rank

Scratch memory holds nothing, so nothing has to be proven before it is written again. A write that outlives the
deadline keeps the peer loaded until the agent says that it is over.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.agents.base import WriteState
from kvtransfer.bounce.memory import unshareable
from kvtransfer.errors import AgentError, AgentUnavailable
from kvtransfer.pools import MemoryKind, RegisteredRegion
from kvtransfer.ports import Incompatibility
from kvtransfer.probe_ports import PairProbe, path_matches
from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.agents.base import Agent, AgentCapabilities, WriteHandle
    from kvtransfer.rank_info import RankInfo

log = logging.getLogger(__name__)

SCRATCH_BYTES = 8 << 20
SMALL_BYTES = 4096
SMALL_WRITES = 9
RUN_BYTES, RUNS = 1024, 256
# For all writes to one rank.
DEADLINE_S = 5.0
# Small writes take microseconds: that long it is worth looking without a pause.
SPIN_S = 100e-6

PeerId = tuple[str, bytes]
Done = Callable[[tuple[PairProbe, ...]], None]
# Asks for one write; gets its seconds back.
Script = Generator[RegionPairs, float, PairProbe]


def host_scratch(nbytes: int = SCRATCH_BYTES) -> tuple[RegisteredRegion, NDArray[np.uint8]]:
    """Scratch memory on the host, and the array that keeps it. Untouched pages cost nothing."""
    array = np.zeros(nbytes, np.uint8)
    return RegisteredRegion(int(array.ctypes.data), nbytes, MemoryKind.DRAM), array


def network_bytes() -> int:
    """What all network interfaces of this network namespace have sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":", 1)[1].split()[8]) for line in lines)


@dataclass(frozen=True, slots=True)
class ProbePolicy:
    """When a pair is measured and what it must turn out to be.

    `on_connect`: before the pair may be used; `require_path` implies it: a pair on another path is refused. `scratch`:
    memory for measuring, registered beside the cache and in the kind of memory that the cache lies in; the owner keeps
    it as long as the agent lives. None: peers can not measure the way to this rank, nor this rank the way to them.
    `host_scratch`: likewise on the host, where the cache is not, for peers whose cache lies on the host.
    """

    scratch: RegisteredRegion | None = None
    on_connect: bool = False
    require_path: str = ""
    host_scratch: RegisteredRegion | None = None

    @property
    def regions(self) -> tuple[RegisteredRegion, ...]:
        """What the agent has to register besides the cache."""
        return tuple(self.announced.values())

    @property
    def announced(self) -> dict[str, RegisteredRegion]:
        """What peers have to know, by the names in RankInfo."""
        found = {"scratch": self.scratch, "host_scratch": self.host_scratch}
        return {name: one for name, one in found.items() if one is not None}

    @property
    def measures(self) -> bool:
        """True when a pair is measured before it may be used."""
        return self.on_connect or bool(self.require_path)

    def check_possible(self, can: AgentCapabilities) -> None:
        """Raises AgentUnavailable when no path of this process can be the required one."""
        if self.require_path and not any(path_matches(path, self.require_path) for path in can.paths):
            known = ", ".join(can.paths)
            raise AgentUnavailable(
                f"transfer.require_path = {self.require_path}: {can.engine} can only take {known} here; "
                "change UCX_TLS or the requirement"
            )

    def check_memory(self, regions: tuple[RegisteredRegion, ...]) -> None:
        """Says loudly which memory can not be shared between devices; with a required path it is refused. Raises
        AgentUnavailable."""
        for region in unshareable(regions):
            problem = (
                f"{region.size_bytes} bytes at {region.base_address:#x} of device {region.device_id} can not be shared "
                "by CUDA IPC: torch has allocated them in expandable segments, so every write goes through the host, "
                "hundreds of times slower; start without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
            )
            if self.require_path:
                raise AgentUnavailable(f"transfer.require_path = {self.require_path}: {problem}")
            log.warning("%s", problem)

    def refuse(self, probe: PairProbe, theirs: str = "") -> tuple[Incompatibility, ...]:
        """Why a measured pair must not be used; `theirs`: what the peer requires."""
        name = "transfer.require_path"
        remedy = f"bring both sides onto that path (UCX_TLS, the same host, the fabric), or change {name}"
        found = f"rank {probe.src_rank} to rank {probe.dst_rank}: {probe.problem or probe.path}"
        against: list[Incompatibility] = []
        if self.require_path and not _takes(probe, self.require_path):
            against.append(Incompatibility(name, self.require_path, found, remedy))
        if theirs and theirs != self.require_path and not _takes(probe, theirs):
            against.append(Incompatibility(name, found, theirs, remedy))
        return tuple(against)


def _takes(probe: PairProbe, required: str) -> bool:
    return not probe.problem and path_matches(probe.path, required)


@dataclass(slots=True, eq=False)
class _Run:
    """Everything that is to be measured at one peer."""

    peer_id: PeerId
    todo: list[tuple[RankInfo, int]]
    done: Done
    results: list[PairProbe] = field(default_factory=list[PairProbe])
    script: Script | None = None
    dst_rank: int = -1
    remote: str = ""
    handle: WriteHandle | None = None
    posted: float = 0.0
    until: float = 0.0


class Probes:
    """Not thread-safe: called from the thread that owns the agent. `clock` in seconds, monotonic.

    `local`: this rank, once it has started.
    `counter`: bytes that the network interfaces have sent so far.
    """

    def __init__(
        self,
        agent: Agent,
        rank: int,
        local: Callable[[], RankInfo],
        clock: Callable[[], float] = time.monotonic,
        counter: Callable[[], int] = network_bytes,
    ) -> None:
        self._agent, self._rank, self._local = agent, rank, local
        self._clock, self._counter = clock, counter
        self._runs: list[_Run] = []
        # Writes that outlived their deadline, with the peer they go to.
        self._late: list[tuple[PeerId, WriteHandle]] = []

    def begin(self, peer_id: PeerId, ranks: list[RankInfo], nbytes: int, done: Done) -> None:
        """Measures the way to each of these ranks, which are loaded, one after the other; `done` gets the results."""
        self._runs.append(_Run(peer_id, [(rank, nbytes) for rank in ranks], done))

    def touches(self, peer_id: PeerId) -> bool:
        """True while a write to the peer may be open: it must stay loaded."""
        return any(run.peer_id == peer_id for run in self._runs) or any(peer == peer_id for peer, _ in self._late)

    @property
    def open_writes(self) -> int:
        """Writes that are posted and not over."""
        return len(self._late) + sum(run.handle is not None for run in self._runs)

    def poll(self) -> bool:
        """Makes progress. True while there is anything to do. Raises AgentBroken."""
        for peer_id, handle in tuple(self._late):
            if self._agent.poll(handle).state is not WriteState.IN_FLIGHT:
                self._agent.release(handle)
                self._late.remove((peer_id, handle))
        # One at a time: measurements must not disturb each other.
        if self._runs:
            self._step(self._runs[0])
        return bool(self._runs or self._late)

    def _step(self, run: _Run) -> None:
        if run.script is None:
            if not run.todo:
                self._runs.remove(run)
                run.done(tuple(run.results))
                return
            self._start(run)
        elif run.handle is not None:
            self._look(run, run.handle)

    def _start(self, run: _Run) -> None:
        peer, nbytes = run.todo.pop(0)
        run.dst_rank, run.until = peer.rank, self._clock() + DEADLINE_S
        local = self._local()
        mine = local.scratch_for(peer.page_table.memory_kind)
        theirs = peer.scratch_for(local.page_table.memory_kind)
        if mine is None or theirs is None:
            who = "this rank" if mine is None else f"rank {peer.rank} of {run.peer_id[0]}"
            self._fail(run, f"{who} has no scratch memory")
            return
        run.remote = peer.agent.name
        run.script = self._measure(peer.rank, peer.agent.name, mine, theirs, nbytes)
        self._advance(run, None)

    def _advance(self, run: _Run, took: float | None) -> None:
        """Gives the script the time of its write and posts the next one."""
        if run.script is None:
            return
        try:
            pairs = next(run.script) if took is None else run.script.send(took)
            run.posted = self._clock()
            run.handle = self._agent.submit(pairs, run.remote)
        except StopIteration as end:
            run.results.append(end.value)
            run.script = run.handle = None
        except AgentError as error:
            self._fail(run, str(error))

    def _look(self, run: _Run, handle: WriteHandle) -> None:
        until = self._clock() + SPIN_S
        while (status := self._agent.poll(handle)).state is WriteState.IN_FLIGHT and self._clock() < until:
            pass
        now = self._clock()
        if status.state is WriteState.IN_FLIGHT:
            if now >= run.until:
                self._late.append((run.peer_id, handle))
                self._fail(run, f"a write did not arrive within {DEADLINE_S:g} s")
            return
        self._agent.release(handle)
        run.handle = None
        if status.state is WriteState.FAILED:
            self._fail(run, status.reason)
        else:
            self._advance(run, now - run.posted)

    def _fail(self, run: _Run, problem: str) -> None:
        run.results.append(PairProbe(self._rank, run.dst_rank, problem=problem))
        run.script = run.handle = None

    def _measure(
        self, dst_rank: int, remote: str, mine: RegisteredRegion, theirs: RegisteredRegion, nbytes: int
    ) -> Script:
        size = min(nbytes or mine.size_bytes, mine.size_bytes, theirs.size_bytes)
        small = _runs(mine, theirs, min(size, SMALL_BYTES), 1)
        first = yield small
        following: list[float] = []
        for _ in range(SMALL_WRITES):
            following.append((yield small))
        sent, transfer = size * 2, float("inf")
        for _ in range(2):
            before = self._counter()
            transfer = min(transfer, (yield _runs(mine, theirs, size, 1)))
            sent = min(sent, self._counter() - before)
        quick, count = statistics.median(following), max(1, min(RUNS, size // (2 * RUN_BYTES)))
        many = yield _runs(mine, theirs, min(size, RUN_BYTES), count)
        per_run = max(0.0, many - quick) / max(1, count - 1)
        path = measured_path(self._agent.path(remote), size, sent)
        return PairProbe(self._rank, dst_rank, path, size, first, quick, transfer, per_run, max(0, sent))


def measured_path(named: str, nbytes: int, sent: int) -> str:
    """The path by the rules of the agent, corrected where the network interfaces, which sent `sent` bytes while
    `nbytes` were written, say otherwise."""
    if "rdma or tcp" in named and sent < nbytes // 2:
        return named.replace("rdma or tcp", "rdma")
    if " cma" in named and sent >= nbytes:
        return f"{named.replace(' cma', ' tcp')} (found by measuring; the rules say cma)"
    return named


def _runs(mine: RegisteredRegion, theirs: RegisteredRegion, size: int, count: int) -> RegionPairs:
    """`count` runs of `size` bytes with gaps as large."""
    offsets = np.arange(count, dtype=np.int64) * (2 * size)
    return RegionPairs(mine.base_address + offsets, theirs.base_address + offsets, np.full(count, size, np.int64))
