# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
"""Two processes with a rank each, over NIXL, the machines of their hubs on a pipe: what a hand-off of a case takes.

The pipe stands for the stream between the hubs: the same messages without gRPC, which adds tenths of a millisecond.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transfer_cases import Case, block_lists, table_bytes

from kvtransfer.bounce.copying import copy_rows
from kvtransfer.bounce_ports import Grant, Scattered
from kvtransfer.messages import KvRequest
from kvtransfer.peer_plan import build_source_plans
from kvtransfer.ports import PeerLoaded, RankBlocks, RequestKey, TokenRange, TransferNotice, WriteOrder
from kvtransfer.rank_info import InstanceInfo
from kvtransfer.regions import RegionPairs
from kvtransfer.session.actions import ToPeer, ToRank
from kvtransfer.session.bounce_receive import BounceReceive
from kvtransfer.transfer import StridedRuns

if TYPE_CHECKING:
    from kvtransfer.session.actions import Action
from transfer_half import CONTEXT, GENERATION, SPIN, Half, Setting, context_main, pattern
from transfer_timeline import lines, watch_half


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
        # Context, generation; and what the last run took of the processor, in seconds.
        self.processes, self.processor = (self.child.pid or 0, os.getpid()), [0.0, 0.0]
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
        before, began = [processor_s(one) for one in self.processes], time.perf_counter()
        self.hub.asked(CONTEXT, KvRequest(key, tokens, (mine,), receive=self.count))
        self.pipe.send(WriteOrder(key, *GENERATION, tokens, (theirs,), (mine,), self.count))
        notice = self._wait()
        took = time.perf_counter() - began
        self.processor = [processor_s(one) - was for one, was in zip(self.processes, before, strict=True)]
        if notice.outcome.name != "DELIVERED" or not self._same():
            raise RuntimeError(f"{self.case.name}, {setting}: {notice.outcome.name} {notice.reason or 'other bytes'}")
        return took, notice

    def timeline(self, setting: Setting) -> list[str]:
        """What both sides do in one run, in order of time."""
        self.pipe.send("watch")
        marks = watch_half(self.half, "generation")
        marks.watch(self.hub, "said")
        marks.watch(self.hub, "scattered")
        both: list[tuple[str, float, float, str]] = []
        for _ in range(3):
            # The last one counts: nothing is new to it.
            self.run(setting)
            self.pipe.send("marks")
            both = [*marks.take(), *self.pipe.recv()]
        return lines(both)

    def _wait(self) -> TransferNotice:
        busy = True
        while True:
            # As a rank's thread, which sleeps in the kernel while it copies nothing: a core that looks all the time is
            # missing for the write where there are few.
            wait = 0 if busy else None
            while self.pipe.poll(wait):
                wait = 0
                for message in self.pipe.recv():
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
        grants = [one.message for one in self.actions if isinstance(one, ToPeer) and isinstance(one.message, Grant)]
        if grants:
            self.pipe.send(grants)
        while self.actions:
            action = self.actions.popleft()
            if isinstance(action, ToRank):
                self.half.rank.handle(action.message)

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


def processor_s(pid: int) -> float:
    """Seconds of processor time of all threads of a process so far, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total * 1e-9
