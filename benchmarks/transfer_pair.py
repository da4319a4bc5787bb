# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""Two processes with a rank each, over NIXL, the machines of their hubs on a pipe: what a hand-off of a case takes.

The pipe stands for the stream between the hubs: the same messages without gRPC, which adds tenths of a millisecond.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any

import numpy as np
from transfer_cases import Case, Side, block_lists, table, table_bytes

from kvtransfer.agents import make_agent
from kvtransfer.bounce.copying import copy_rows
from kvtransfer.bounce.measuring import DEVICE_MOST, HOST_MOST, measure_copies
from kvtransfer.bounce.memory import HOST_ARENA, HostPages, make_arena, make_copier
from kvtransfer.bounce.policy import BouncePolicy, starting_cost
from kvtransfer.bounce_ports import Grant, PeerWord, Scattered
from kvtransfer.cost.book import CostBook
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.messages import KvRequest
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.peer_plan import build_source_plans
from kvtransfer.ports import LoadPeer, PeerLoaded, RankBlocks, RequestKey, TokenRange, TransferNotice, WriteOrder
from kvtransfer.rank_info import InstanceInfo, InstanceRole, ModelFingerprint, Topology
from kvtransfer.regions import RegionPairs
from kvtransfer.session.actions import ToPeer, ToRank
from kvtransfer.session.bounce_receive import BounceReceive
from kvtransfer.transceiver.probing import SCRATCH_BYTES, ProbePolicy, host_scratch
from kvtransfer.transceiver.rank import RankTransceiver
from kvtransfer.transfer import StridedRuns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvtransfer.rank_info import RankInfo
    from kvtransfer.session.actions import Action

MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "BF16")
# Both processes may look all the time.
SPIN = (os.cpu_count() or 1) > 4
CONTEXT, GENERATION = ("c", b"c" * 16), ("g", b"g" * 16)


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run bounces. `chunk_bytes` 0: what the cost model finds; `depth` 1 and one chunk: in series."""

    staging: str = "cost"
    chunk_bytes: int = 0
    depth: int = 3


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
        size = setting.chunk_bytes or 128 << 20
        object.__setattr__(self.policy, "chunk_bytes", size)
        object.__setattr__(self.policy, "unit_bytes", size if setting.chunk_bytes else 1 << 20)

    def take(self) -> list[Any]:
        events, self.events[:] = list(self.events), []
        return events


def context_main(pipe: Connection, case: Case, tokens: int, device: int | None, arena: int) -> None:
    """Serves the context side until the pipe closes."""
    half = Half(CONTEXT, case, tokens, device, arena)
    pipe.send(half.info)
    half.rank.handle(LoadPeer(pipe.recv(), half.info.ranks, bounce=True))
    while not any(isinstance(one, PeerLoaded) for one in half.events):
        half.rank.poll()
    (loaded,) = half.take()
    pipe.send(loaded)
    pipe.send(half.book.cost(half.agent.path(_remote(half))))
    busy = SPIN
    while True:
        # As a rank's thread, which sleeps shortly where a core is not to spare. (A poll with a timeout takes whole ms.)
        wait = 0 if busy else None
        while pipe.poll(wait):
            wait = 0
            try:
                message = pipe.recv()
            except EOFError:
                os._exit(0)
            if isinstance(message, Setting):
                half.set(message)
            elif isinstance(message, tuple):
                pipe.send(_raw(half, *message))
            else:
                half.rank.handle(message)
        busy = half.rank.poll() or SPIN
        said = half.take()
        if busy and not said and not SPIN:
            time.sleep(20e-6)
        for event in said:
            pipe.send(event.body if isinstance(event, PeerWord) else event)


def _remote(half: Half) -> str:
    return next(iter(half.rank._peers.values())).info.ranks[0].agent.name  # pyright: ignore[reportPrivateUsage]


def _raw(half: Half, address: int, nbytes: int) -> float:
    """Seconds of one NIXL write of one piece."""
    ends = (np.array([half.cache.base_address]), np.array([address]), np.array([nbytes]))
    began = time.perf_counter()
    handle = half.agent.submit(RegionPairs(*ends), _remote(half))
    while half.agent.poll(handle).state.name == "IN_FLIGHT":
        pass
    took = time.perf_counter() - began
    half.agent.release(handle)
    return took


class Pair:
    """The generation side in this process, the context side in a child."""

    def __init__(self, case: Case, nbytes: int, devices: tuple[int | None, int | None], arena: int) -> None:
        self.tokens = case.tokens(nbytes)
        self.case = case
        ours, theirs = Pipe()
        context = multiprocessing.get_context("spawn")
        arguments = (theirs, case, self.tokens, devices[0], arena)
        self.child = context.Process(target=context_main, args=arguments, daemon=True)
        self.child.start()
        theirs.close()
        self.pipe = ours
        self.half = Half(GENERATION, case, self.tokens, devices[1], arena)
        peer: InstanceInfo = ours.recv()
        ours.send(self.half.info)
        loaded: PeerLoaded = ours.recv()
        if loaded.incompatibilities:
            raise RuntimeError(str(loaded.incompatibilities))
        self.cost = ours.recv()
        self.actions: deque[Action] = deque()
        self.hub = BounceReceive(self.half.info, 1 << 20, 1, self.actions.append)
        self.hub.meet(CONTEXT, peer)
        self._carry()
        self.plan = build_source_plans(peer, self.half.info, 0)[0]
        self.source_blocks, self.count = -(-self.tokens // case.src.block), 0
        self.every = block_lists(case, self.tokens, 7)
        self.resize(self.tokens)

    def resize(self, tokens: int) -> None:
        """What runs move from now on: a prompt of so many tokens, at most those of the pair."""
        self.tokens = tokens
        sides = (self.case.src, self.case.dst)
        self.lists = tuple(every[: -(-tokens // side.block)] for every, side in zip(self.every, sides, strict=True))
        transfer = self.plan.resolve({0: self.lists[0]}, {0: self.lists[1]}, TokenRange(0, tokens))
        self.nbytes, self.fragments = transfer.nbytes, transfer.fragments
        self._expected = self._expect(transfer.pairs())

    def close(self) -> None:
        """Ends the child, then this side's agent: memory must not go behind a live one."""
        self.pipe.close()
        self.child.join(10)
        self.half.rank.close()

    def raw(self) -> float:
        """Seconds of one contiguous write of the same bytes."""
        self.pipe.send((self.half.cache.base_address, min(self.nbytes, self.half.cache.size_bytes)))
        return self.pipe.recv()

    def run(self, setting: Setting) -> tuple[float, TransferNotice]:
        """Seconds from the request until the cache is there, its bytes verified, and the writer's word."""
        self.half.set(setting)
        self.pipe.send(setting)
        self._clear()
        self.count += 1
        key, tokens = RequestKey((1 << 40) + self.count), TokenRange(0, self.tokens)
        mine, theirs = RankBlocks(0, 0, self.lists[1]), RankBlocks(0, 0, self.lists[0])
        began = time.perf_counter()
        self.hub.asked(CONTEXT, KvRequest(key, tokens, (mine,), receive=self.count))
        self.pipe.send(WriteOrder(key, *GENERATION, tokens, (theirs,), (mine,), self.count))
        notice = self._wait()
        took = time.perf_counter() - began
        if notice.outcome.name != "DELIVERED" or not self._same():
            raise RuntimeError(f"{self.case.name}, {setting}: {notice.outcome.name} {notice.reason or 'other bytes'}")
        return took, notice

    def _wait(self) -> TransferNotice:
        busy = True
        while True:
            # As a rank's thread, which sleeps in the kernel while it copies nothing: a core that looks all the time is
            # missing for the write where there are few.
            wait = 0 if busy else None
            while self.pipe.poll(wait):
                wait = 0
                message = self.pipe.recv()
                if isinstance(message, TransferNotice):
                    told = self.hub.screen(CONTEXT, message)
                    if told is not None:
                        return told
                else:
                    self.hub.said(CONTEXT, message)
            self._carry()
            busy = self.half.rank.poll() or SPIN
            events = self.half.take()
            for event in events:
                if isinstance(event, Scattered):
                    for _, word in self.hub.scattered(0, event):
                        return word
            # Room may have come back, which somebody waits for.
            busy |= bool(events)

    def _carry(self) -> None:
        while self.actions:
            action = self.actions.popleft()
            if isinstance(action, ToRank):
                self.half.rank.handle(action.message)
            elif isinstance(action, ToPeer) and isinstance(action.message, Grant):
                self.pipe.send(action.message)

    def _expect(self, pairs: RegionPairs) -> Any:
        """The destination as it must be, by plain copies on the host."""
        side = self.case.src
        source = np.array(pattern(table_bytes(side, self.source_blocks, self.case.layers), 1))
        target = np.full(self.half.cache.size_bytes, 0xEE, np.uint8)
        src, dst = pairs.src - self.plan.tables[0].regions[0].base_address, pairs.dst - self.half.cache.base_address
        length = int(pairs.lengths[0])
        if self.half.memory.device is not None and (pairs.lengths == length).all():
            return self._expect_there(source, target, src // length, dst // length, length)
        one = np.ones(len(pairs), np.int64)
        rows = StridedRuns(src, dst, np.array(pairs.lengths), one, one * 0, one * 0)
        copy_rows(src + int(source.ctypes.data), dst + int(target.ctypes.data), rows)
        if self.half.memory.device is None:
            return target
        import torch

        return torch.from_numpy(target).to(self.half.bytes.device)

    def _expect_there(self, source: Any, target: Any, src: Any, dst: Any, length: int) -> Any:
        """By torch's own indexing; runs of these cases are equally long and lie at multiples of their length."""
        import torch

        device = self.half.bytes.device
        near, far = (torch.from_numpy(one).to(device) for one in (source, target))
        rows = near.view(torch.int64).view(-1, length // 8)[torch.from_numpy(src).to(device)]
        far.view(torch.int64).view(-1, length // 8)[torch.from_numpy(dst).to(device)] = rows
        return far

    def _clear(self) -> None:
        self.half.bytes[:] = 0xEE
        if self.half.memory.device is not None:
            import torch

            torch.cuda.synchronize()

    def _same(self) -> bool:
        if self.half.memory.device is None:
            return bool(np.array_equal(self.half.bytes, self._expected))
        import torch

        return bool(torch.equal(self.half.bytes, self._expected))
