"""A scheduler over the mock model without threads, sockets or a clock, and a stand-in for its hub.

The bench checks after every call what must always hold: the order of the events of a request, blocks with one owner,
and no block freed while a peer may touch it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from isthmus_core.config import MockConfig
from isthmus_core.keys import RequestKey
from isthmus_worker.cache import BlockManager
from isthmus_worker.engine import ContextPhase, EngineRequest, RequestType, Sampling
from isthmus_worker.mock_engine import MockRunner
from isthmus_worker.runner import BatchRow, ModelRunner, NonFiniteLogits
from isthmus_worker.scheduler import (
    ContextDone,
    Handoffs,
    Limits,
    RequestFinished,
    RequestReleased,
    RequestTokens,
    Scheduler,
    SchedulerEvent,
)
from kvtransfer.page_table import PageTable
from kvtransfer.ports import (
    CancelTransfer,
    Holder,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    SendOffer,
    SendOutcome,
    TransferFailure,
)
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

HOLDER = Holder("127.0.0.1:7", "context-0", b"i" * 16)
LEGS = {
    "context": RequestType.CONTEXT_ONLY,
    "generation": RequestType.GENERATION_ONLY,
    "context_and_generation": RequestType.CONTEXT_AND_GENERATION,
}
_IDS = count(1 << 41)


def new_key() -> RequestKey:
    """A key that no other request of this process has."""
    return RequestKey(next(_IDS))


def memory_of(table: PageTable) -> NDArray[np.uint8]:
    """The bytes of a slot-major cache, uint8[blocks, block_bytes]."""
    pool = table.pools[0]
    raw = (ctypes.c_uint8 * (pool.num_slots * pool.slot_bytes)).from_address(pool.base_address)
    return np.ctypeslib.as_array(raw).reshape(pool.num_slots, pool.slot_bytes)


@dataclass
class Trail:
    """What one request has said so far."""

    tokens: list[int] = field(default_factory=list[int])
    end: ContextDone | RequestFinished | None = None
    released: bool = False


class PoisonedRunner:
    """The mock, whose logits are not finite for rows that hold the poisoned token."""

    def __init__(self, inner: ModelRunner, poison: int) -> None:
        self._inner, self._poison = inner, poison

    def execute(self, rows: list[BatchRow]) -> list[int]:
        """As the mock, or NonFiniteLogits."""
        tokens = self._inner.execute(rows)
        bad = [index for index, row in enumerate(rows) if row.want_token and self._poison in row.token_ids]
        if not bad:
            return tokens
        raise NonFiniteLogits(bad, [-1 if index in bad else token for index, token in enumerate(tokens)])


class Bench:
    """`log` holds events and messages to the hub in order; `trails` what each request has said."""

    def __init__(
        self,
        role: str = "context_and_generation",
        *,
        num_blocks: int = 32,
        tokens_per_block: int = 4,
        max_model_len: int = 128,
        max_running: int = 4,
        max_batch_tokens: int = 16,
        max_waiting: int = 8,
        poison: int | None = None,
    ) -> None:
        self.role = role
        self.runner = MockRunner(MockConfig(max_model_len=max_model_len), "mock", tokens_per_block)
        self.memory = memory_of(self.runner.allocate_cache(num_blocks))
        self.blocks = BlockManager(num_blocks, tokens_per_block)
        self.log: list[SchedulerEvent | SchedulerToHub] = []
        self.trails: dict[RequestKey, Trail] = {}
        # Blocks that a peer may touch, as the hub knows them.
        self.exposed: dict[RequestKey, NDArray[np.int32]] = {}
        self.rows: list[int] = []
        self.now = 0.0
        self.transceiver = SchedulerTransceiver(self, lambda: self.now)
        limits = Limits(
            role, 257, max_model_len, tokens_per_block, num_blocks, max_running, max_batch_tokens, max_waiting
        )
        self.scheduler = Scheduler(limits, self.blocks, self._event, Handoffs(self.transceiver, 1, 30.0))
        self._executor = self.runner if poison is None else PoisonedRunner(self.runner, poison)

    # --- what the loop does

    def submit(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        key: RequestKey | None = None,
        stop: Sequence[int] = (),
        first: Sequence[int] = (65,),
        leg: RequestType | None = None,
        phase: ContextPhase | None = None,
    ) -> RequestKey:
        """A request of this instance's role, or what the arguments say."""
        key, leg = key or new_key(), leg or LEGS[self.role]
        if leg is RequestType.GENERATION_ONLY and phase is None:
            phase = ContextPhase(key, tuple(first), len(prompt), HOLDER)
        request = EngineRequest(key, leg, tuple(prompt), Sampling(max_tokens, tuple(stop)), phase)
        self.scheduler.submit(request, self.now)
        self.trails[key] = Trail()
        return key

    def abort(self, key: RequestKey) -> None:
        """As the hub's AbortCommand."""
        self.scheduler.abort(key)
        self.check()

    def step(self) -> bool:
        """One turn of the loop. False when there was nothing to compute."""
        self.scheduler.poll()
        plan = self.scheduler.plan(self.now)
        failed: list[int] = []
        if plan.rows:
            try:
                tokens = self._executor.execute(plan.rows)
            except NonFiniteLogits as error:
                tokens, failed = error.tokens, error.rows
            self.now += 1.0
            self.rows.append(len(plan.rows))
            self.scheduler.apply(plan, tokens, frozenset(failed), self.now)
        self.check()
        return bool(plan.rows)

    def run(self) -> None:
        """Until there is nothing to compute."""
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("does not come to rest")

    # --- the hub

    def send(self, message: SchedulerToHub) -> None:
        """The transceiver's port."""
        self.log.append(message)
        if isinstance(message, SendOffer):
            self.exposed[message.key] = message.sources[0].blocks.copy()
        elif isinstance(message, ReceiveRequest):
            self.exposed[message.key] = message.destinations[0].blocks.copy()

    def deliver_send(self, key: RequestKey, failure: TransferFailure = TransferFailure.NONE) -> None:
        """The offer is over."""
        del self.exposed[key]
        self.transceiver.deliver(SendOutcome(key, failure))

    def deliver_receive(
        self, key: RequestKey, failure: TransferFailure = TransferFailure.NONE, *, settled: bool = True
    ) -> None:
        """The cache is here, or will not come."""
        if settled:
            del self.exposed[key]
        self.transceiver.deliver(ReceiveOutcome(key, settled, failure, "as told by the test"))

    def messages(self, kind: type[SchedulerToHub]) -> list[SchedulerToHub]:
        """Messages of one kind, in order."""
        return [one for one in self.log if isinstance(one, kind)]

    def cancels(self, key: RequestKey) -> int:
        """How often the hub was told to cancel."""
        return sum(one.key == key for one in self.messages(CancelTransfer))

    # --- invariants

    def _event(self, event: SchedulerEvent) -> None:
        self.log.append(event)
        trail = self.trails[event.key]
        assert not trail.released, f"{event} after the release"
        if isinstance(event, RequestReleased):
            assert trail.end is not None, "released before the client was told"
            assert event.key not in self.exposed, "released while a peer may touch the blocks"
            trail.released = True
        else:
            assert trail.end is None, f"{event} after the end"
            if isinstance(event, RequestTokens):
                trail.tokens += event.ids
            else:
                trail.end = event

    def check(self) -> None:
        """Raises AssertionError when something that must always hold does not."""
        self.blocks.check_integrity()
        free = self._free_blocks()
        for key, blocks in self.exposed.items():
            assert not free.intersection(blocks.tolist()), f"blocks of {key} are free while a peer may touch them"
            assert self.blocks.table(key)[: len(blocks)].tolist() == blocks.tolist()
        live = {key for key, trail in self.trails.items() if not trail.released}
        assert self.scheduler.live == len(live)

    def _free_blocks(self) -> set[int]:
        held: set[int] = set()
        for key in self.trails:
            if self.blocks.held(key):
                table = set(self.blocks.table(key).tolist())
                assert not held & table, "a block has two owners"
                held |= table
        assert len(held) == self.blocks.used
        return set(range(self.blocks.num_blocks)) - held

    def check_idle(self) -> None:
        """Nothing is left of anything."""
        self.scheduler.check_idle()
        assert self.blocks.used == 0
        assert all(trail.released and trail.end for trail in self.trails.values())
        assert not self.exposed


def copy_cache(source: Bench, destination: Bench, key: RequestKey) -> None:
    """What the ranks do: the bytes of an offered prompt into the blocks that wait for it."""
    (offer,) = (one for one in source.messages(SendOffer) if one.key == key)
    (wanted,) = (one for one in destination.messages(ReceiveRequest) if one.key == key)
    assert isinstance(offer, SendOffer)
    assert isinstance(wanted, ReceiveRequest)
    assert offer.tokens == wanted.tokens
    destination.memory[wanted.destinations[0].blocks] = source.memory[offer.sources[0].blocks]
