"""NIXL knows nothing of CUDA streams: kernels that take long stand before what it could read or overwrite too early.

this process: the engine's step, and its rank ── NIXL ──▶ a child with a page table of its own, on the same GPU
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from device_storage import DeviceStorage
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine import TorchRunner
from kv_storage import GUARD, instance
from kvtransfer.agents import make_agent
from kvtransfer.peer_plan import build_plan
from kvtransfer.ports import LoadPeer, RankBlocks, RequestKey, TokenRange, TransferNotice, WriteOrder, WriterOutcome
from kvtransfer.transceiver.layer_progress import LayerProgress
from spin_peer import BLOCK, BLOCKS, MARK, SHAPE, Peer, Side, peer
from tiny_models import tiny_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(200),
]
# About a second on an H200.
LONG_CYCLES = 2_000_000_000
KEY, TOKENS = RequestKey(1 << 40), TokenRange(0, 48 * BLOCK)


def wait_on_the_gpu() -> None:
    """A kernel that does nothing for long."""
    torch.cuda._sleep(LONG_CYCLES)  # pyright: ignore[reportPrivateUsage]


@pytest.fixture(name="other")
def _other() -> Iterator[Peer]:
    with peer() as one:
        yield one


def until(said: Callable[[], bool], side: Side) -> None:
    deadline = time.monotonic() + 60
    while not said():
        side.rank.poll()
        assert time.monotonic() < deadline


class Step:
    """Four layers whose kernels write the cache; before the second one the GPU waits."""

    def __init__(self, storage: DeviceStorage) -> None:
        self.storage = storage
        self.result = np.random.default_rng(3).integers(0, 255, len(storage.memory), np.uint8)
        self._values = torch.from_numpy(self.result).to("cuda:0")
        storage.memory[:] = 0
        storage.upload()

    def run(self, layers: LayerProgress, *, events: bool) -> None:
        """As the torch engine does it; without `events` a layer counts as written when it is launched."""
        layers.begin()
        slots = [one[GUARD:-GUARD].view(BLOCKS, len(SHAPE.layers), -1) for one in (self.storage.twin, self._values)]
        for number in SHAPE.layers:
            if number == 1:
                wait_on_the_gpu()
            slots[0][:, number].copy_(slots[1][:, number])
            event = torch.cuda.Event()
            event.record()
            layers.done(number + 1, event if events else None)
        torch.cuda.synchronize()
        layers.end()


def write_while_computed(other: Peer, *, events: bool) -> tuple[TransferNotice, bytes, bytes]:
    """A layer-wise write of 48 blocks: the notice, the peer's memory, and what it should be."""
    layers = LayerProgress()
    side = Side("context", "slot_major", layers)
    step, receiver = Step(side.storage), instance(other.info)
    side.rank.handle(LoadPeer(receiver))
    until(lambda: bool(side.events), side)
    side.events.clear()
    rng = np.random.default_rng(1)
    lists = [rng.permutation(BLOCKS)[:48].astype(np.int32) for _ in range(2)]
    pages = ((RankBlocks(0, 0, one),) for one in lists)
    who = receiver.instance_id, receiver.incarnation
    side.rank.handle(WriteOrder(KEY, *who, TOKENS, *pages, step=layers.next_step))
    computing = threading.Thread(target=step.run, args=(layers,), kwargs={"events": events})
    computing.start()
    until(lambda: bool(side.events), side)
    computing.join()
    pairs = build_plan(side.rank.info, other.info).instantiate({0: lists[0]}, {0: lists[1]}, TOKENS)
    expected = np.full(len(side.storage.memory), 0xEE, np.uint8)
    there = other.info.page_table.regions[0].base_address
    begins = (pairs.src - side.storage.base + GUARD).tolist(), (pairs.dst - there + GUARD).tolist()
    for src, dst, length in zip(*begins, pairs.lengths.tolist(), strict=True):
        expected[dst : dst + length] = step.result[src : src + length]
    return side.events[0], other.read(), expected.tobytes()


def test_a_layer_behind_a_long_kernel_is_posted_after_it(other: Peer) -> None:
    notice, found, expected = write_while_computed(other, events=True)
    assert notice.outcome is WriterOutcome.DELIVERED
    assert notice.stats.why.startswith("layer by layer")
    assert found == expected


def test_without_the_events_other_bytes_arrive(other: Peer) -> None:
    """Launched is not written: the test above can fail."""
    _, found, expected = write_while_computed(other, events=False)
    assert found != expected


class _Slow:
    """Attention that lets the GPU wait before the last layer's K and V are written."""

    def __init__(self, attention: Any, last: int) -> None:
        self.name, self._attention, self._last = attention.name, attention, last

    def begin(self, plan: Any) -> Any:
        step = self._attention.begin(plan)

        def layer(number: int, qkv: torch.Tensor) -> torch.Tensor:
            if number == self._last:
                wait_on_the_gpu()
            return step(number, qkv)

        return layer


@pytest.mark.parametrize("waits", [True, False], ids=["as it is", "without waiting for the step"])
def test_a_page_is_exposed_after_its_last_kernel(
    other: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """What a peer writes into a page as soon as the step that used it is over stays; otherwise a late kernel would
    write over it."""
    runner = TorchRunner(tiny_llama(tmp_path / "model"), device="cuda", attention="sdpa")
    table = runner.allocate_cache(16)
    (region,) = table.regions
    runner.warm_up()
    agent = make_agent("nixl", "generation")
    agent.register([region])
    assert other.mark(agent, region) == "DONE"  # connected from now on
    monkeypatch.setattr(runner, "_attention", _Slow(runner._attention, 1))  # pyright: ignore[reportPrivateUsage]
    if not waits:
        monkeypatch.setattr(runner, "_finish", lambda: None)
    # A chunk of a prompt after which no token is drawn: nothing but the end of the step waits for the GPU.
    runner.execute([BatchRow(np.arange(4, 24), 0, (np.array([5, 3], np.int32),), ())])
    assert other.mark(agent, region) == "DONE"
    torch.cuda.synchronize()
    cache = runner._pool._memory[: region.size_bytes]  # pyright: ignore
    assert bool((cache == MARK).all()) is waits
