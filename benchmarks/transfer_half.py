# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""One side of a measured pair: a rank over NIXL with its memory, and the process of the context side."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from transfer_cases import Case, Side, table, table_bytes
from transfer_timeline import watch_half

from kvtransfer.agents import make_agent
from kvtransfer.bounce.measuring import DEVICE_MOST, HOST_MOST, measure_copies
from kvtransfer.bounce.memory import HOST_ARENA, HostPages, make_arena, make_copier
from kvtransfer.bounce.policy import BouncePolicy, starting_cost
from kvtransfer.bounce_ports import Grant, PeerWord
from kvtransfer.cost.book import CostBook
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.ports import LoadPeer, PeerLoaded
from kvtransfer.rank_info import InstanceInfo, InstanceRole, ModelFingerprint, Topology
from kvtransfer.regions import RegionPairs
from kvtransfer.transceiver.probing import SCRATCH_BYTES, ProbePolicy, host_scratch
from kvtransfer.transceiver.rank import RankTransceiver

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtransfer.rank_info import RankInfo
MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "BF16")
# Both processes may look all the time.
SPIN = (os.cpu_count() or 1) > 4 and os.environ.get("PAIR_SPIN") != "0"
CONTEXT, GENERATION = ("c", b"c" * 16), ("g", b"g" * 16)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run bounces. `chunk_bytes` 0: what the cost model finds; `depth` 1 and one chunk: in series."""

    staging: str = "cost"
    chunk_bytes: int = 0
    depth: int = 4


@dataclass(slots=True)
class Memory:
    """The memory of one side: on the host, or on CUDA device `device`."""

    device: int | None
    keep: list[Any] = field(default_factory=list[Any])

    def take(self, nbytes: int, seed: int | None) -> tuple[RegisteredRegion, Any]:
        """Registered-to-be memory, random bytes by `seed`, and the array or tensor."""
        if self.device is None:
            array = np.zeros(nbytes, np.uint8)
            if seed is not None:
                array[:] = pattern(nbytes, seed)
            self.keep.append(array)
            return RegisteredRegion(int(array.ctypes.data), nbytes, MemoryKind.DRAM), array
        import torch

        tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{self.device}")
        if seed is not None:
            tensor.copy_(torch.from_numpy(pattern(nbytes, seed)))
        self.keep.append(tensor)
        return RegisteredRegion(tensor.data_ptr(), nbytes, MemoryKind.VRAM, self.device), tensor


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that both sides can make."""
    return np.random.default_rng(seed).integers(0, 1 << 63, -(-nbytes // 8), np.int64).view(np.uint8)[:nbytes]


class Half:
    """What both processes have."""

    def __init__(self, name: tuple[str, bytes], case: Case, tokens: int, device: int | None, arena: int) -> None:
        side = case.src if name is CONTEXT else case.dst
        self.case, self.tokens, self.memory = case, tokens, Memory(device)
        self.blocks = -(-tokens // side.block)
        seed = 1 if name is CONTEXT else None
        self.cache, self.bytes = self.memory.take(table_bytes(side, self.blocks, case.layers), seed)
        self.events: list[Any] = []
        scratch, _ = self.memory.take(SCRATCH_BYTES, 2)
        region, keep = make_arena(self.cache, arena)
        self.memory.keep.append(keep)
        self.copier = make_copier(self.cache)
        most = HOST_MOST if device is None else DEVICE_MOST
        copies = measure_copies(self.copier, region.base_address, region.size_bytes, most)
        self.book = CostBook(starting_cost(self.cache.memory_kind))
        self.book.copying(copies)
        sends = name is CONTEXT
        end = "send" if sends else "receive"
        arenas: dict[str, Any] = {end: region}
        on_host = None
        if device is not None:
            # As a worker has them beside a device: for a peer whose cache lies on the host.
            pages = HostPages(min(arena, HOST_ARENA))
            arenas |= {f"host_{end}": pages.region, "lock_host": pages.lock}
            on_host, kept = host_scratch()
            self.memory.keep += [pages, kept]
        self.policy = replace(BouncePolicy(copier=self.copier, book=self.book), **arenas)
        kind = (self.cache.memory_kind, self.cache.device_id)
        page_table, _ = table(side, self.cache.base_address, self.blocks, self.case.layers, kind)
        self.agent = make_agent("nixl", name[0])
        # The other heads of a wider peer are those of ranks that stay silent.
        other = case.dst if name is CONTEXT else case.src
        self.ranks = max(1, other.heads // side.heads)
        self.rank = RankTransceiver(
            page_table,
            0,
            Topology(tp_size=self.ranks),
            self.agent,
            self.events.append,
            time.perf_counter,
            1 << 40,
            ProbePolicy(scratch, host_scratch=on_host),
            self.policy,
        )
        self.rank.start()
        self.events.clear()
        role = InstanceRole.CONTEXT if sends else InstanceRole.GENERATION
        self.info = InstanceInfo(*name, "h:1", role, MODEL, (self.rank.info, *self._silent(side, kind)))

    def _silent(self, side: Side, kind: tuple[MemoryKind, int]) -> Iterator[RankInfo]:
        for number in range(1, self.ranks):
            other = replace(side, first_head=number * side.heads)
            page_table, _ = table(other, self.cache.base_address, self.blocks, self.case.layers, kind)
            topology = Topology(tp_size=self.ranks, tp_rank=number)
            yield replace(self.rank.info, rank=number, topology=topology, page_table=page_table)

    def set(self, setting: Setting) -> None:
        """How to bounce from now on."""
        for name, value in (("staging", StagingPolicy(setting.staging)), ("depth", setting.depth)):
            object.__setattr__(self.policy, name, value)
        size = setting.chunk_bytes or 256 << 20
        object.__setattr__(self.policy, "chunk_bytes", size)
        object.__setattr__(self.policy, "unit_bytes", size if setting.chunk_bytes else 1 << 20)

    def take(self) -> list[Any]:
        events, self.events[:] = list(self.events), []
        return events


def context_main(pipe: Connection, case: Case, tokens: int, device: int | None, arena: int) -> None:
    """Serves the context side until the pipe closes."""
    half = Half(CONTEXT, case, tokens, device, arena)
    pipe.send(half.info)
    peer: InstanceInfo = pipe.recv()
    half.rank.handle(LoadPeer(peer, half.info.ranks, bounce=True))
    remote = peer.ranks[0].agent.name
    while not any(isinstance(one, PeerLoaded) for one in half.events):
        half.rank.poll()
    (loaded,) = half.take()
    pipe.send(loaded)
    pipe.send(half.book.cost(half.agent.path(remote)))
    busy, marks = SPIN, None
    while True:
        # As a rank's thread, which sleeps shortly where a core is not to spare. (A poll with a timeout takes whole ms.)
        wait = 0 if busy else None
        while pipe.poll(wait):
            wait = 0
            try:
                message: Any = pipe.recv()
            except EOFError:
                os._exit(0)
            match message:
                case Setting():
                    half.set(message)
                case "watch":
                    marks = watch_half(half, "context")
                case "marks":
                    pipe.send([] if marks is None else marks.take())
                case (int(address), int(nbytes)):
                    pipe.send(_raw(half, remote, address, nbytes))
                case list():
                    for grant in cast("list[Grant]", message):
                        half.rank.handle(grant)
                case _:
                    half.rank.handle(message)
        busy = half.rank.poll() or SPIN
        said = half.take()
        if busy and not said and not SPIN:
            time.sleep(20e-6)
        if said:
            # What is queued leaves together, as on the stream.
            pipe.send([event.body if isinstance(event, PeerWord) else event for event in said])


def _raw(half: Half, remote: str, address: int, nbytes: int) -> float:
    """Seconds of one NIXL write of one piece."""
    ends = (np.array([half.cache.base_address]), np.array([address]), np.array([nbytes]))
    began = time.perf_counter()
    handle = half.agent.submit(RegionPairs(*ends), remote)
    while half.agent.poll(handle).state.name == "IN_FLIGHT":
        pass
    took = time.perf_counter() - began
    half.agent.release(handle)
    return took
