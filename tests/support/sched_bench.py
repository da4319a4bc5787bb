"""A scheduler over the mock model without threads, sockets or a clock, and a stand-in for its hub.

The bench checks after every call what must always hold: the order of the events of a request, blocks with one owner,
and no block freed while a peer may touch it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus_core.config import MockConfig
from isthmus_core.keys import RequestKey
from isthmus_worker.cache import BlockManager, BlockTable
from isthmus_worker.engine import ContextPhase, EngineRequest, FinishReason, KvEvent, RequestType, Sampling, Tokens
from isthmus_worker.mock_engine import MockRunner
from isthmus_worker.runner import BatchRow, Drawn, ModelRunner, NonFiniteLogits
from isthmus_worker.scheduler import (
    ContextDone,
    Handoffs,
    Held,
    Limits,
    Memory,
    RequestFinished,
    RequestReleased,
    RequestTokens,
    RequestTookOver,
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
from kvtransfer.transceiver.layer_progress import LayerProgress
from kvtransfer.transceiver.policy import HandoffPolicy
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
    """What one request has said so far. `tokens`: by answer; `reasons`: of the answers that have ended."""

    answers: dict[int, list[int]] = field(default_factory=dict[int, list[int]])
    reasons: dict[int, FinishReason] = field(default_factory=dict[int, FinishReason])
    end: ContextDone | RequestFinished | None = None
    took_over: str | None = None
    released: bool = False

    @property
    def tokens(self) -> list[int]:
        """Of the first answer."""
        return self.answers.get(0, [])

    @property
    def reason(self) -> FinishReason | None:
        """Of the first answer."""
        return self.reasons.get(0)

    def add(self, chunk: Tokens) -> None:
        """Tokens of one answer, which has not ended."""
        assert chunk.sample not in self.reasons, f"{chunk} after the end of the answer"
        self.answers.setdefault(chunk.sample, []).extend(chunk.ids)
        if chunk.reason is not None:
            self.reasons[chunk.sample] = chunk.reason


def _root(salt: bytes) -> bytes:
    """Parent of first blocks."""
    return b"root" + salt


class PoisonedRunner:
    """The mock, whose logits are not finite for rows that hold the poisoned token."""

    def __init__(self, inner: ModelRunner, poison: int) -> None:
        self._inner, self._poison = inner, poison

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        """As the mock, or NonFiniteLogits."""
        drawn = self._inner.execute(rows)
        bad = [index for index, row in enumerate(rows) if row.draws and self._poison in row.token_ids]
        if not bad:
            return drawn
        raise NonFiniteLogits(bad, [() if index in bad else row for index, row in enumerate(drawn)])


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
        prefix_caching: bool = True,
        window: int | None = None,
        policy: HandoffPolicy | None = None,
        draft_tokens: int = 0,
        reserve_early: bool = False,
        may_take_over: bool = False,
        layer_wise: bool = False,
        fill_gate: int = 0,
    ) -> None:
        self.role = role
        self.may_take_over = may_take_over
        self.runner = MockRunner(MockConfig(max_model_len=max_model_len), "mock", tokens_per_block)
        self.memory = memory_of(self.runner.allocate_cache(num_blocks))
        self.blocks = BlockManager(num_blocks, tokens_per_block)
        self.log: list[SchedulerEvent | SchedulerToHub] = []
        # Names of blocks that can be found, as a reader of the events knows them.
        self.reusable: set[bytes] = set()
        self.trails: dict[RequestKey, Trail] = {}
        # Blocks that a peer may touch, as the hub knows them.
        self.exposed: dict[RequestKey, NDArray[np.int32]] = {}
        self._asked: list[ReceiveRequest] = []
        self.rows: list[int] = []
        self.now = 0.0
        self.transceiver = SchedulerTransceiver(self, lambda: self.now, policy)
        limits = Limits(
            role,
            257,
            max_model_len,
            tokens_per_block,
            num_blocks,
            max_running,
            max_batch_tokens,
            max_waiting,
            draft_tokens,
            fill_gate=fill_gate,
        )
        memory = Memory(BlockTable(self.blocks, window), _root if prefix_caching else None, max_batch_tokens)
        self.layers = LayerProgress()
        layers = self.layers if layer_wise else None
        handoffs = Handoffs(self.transceiver, [Held(0, 0)], 30.0, reserve_early=reserve_early, layers=layers)
        self.scheduler = Scheduler(limits, memory, self._event, handoffs)
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
        salt: bytes = b"",
        at_once: bool = False,
        **sampling: Any,
    ) -> RequestKey:
        """A request of this instance's role, or what the arguments say. `at_once`: the other leg starts too."""
        key = key or new_key()
        if (leg or LEGS[self.role]) is RequestType.GENERATION_ONLY and phase is None and not at_once:
            chunks = [Tokens(tuple(first), sample) for sample in range(sampling.get("n", 1))]
            phase = ContextPhase(key, tuple(chunks), len(prompt), HOLDER)
        chosen = Sampling(max_tokens, tuple(stop), **sampling)
        return self.submit_as(prompt, chosen, key=key, leg=leg, phase=phase, salt=salt, at_once=at_once)

    def submit_as(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        key: RequestKey,
        leg: RequestType | None = None,
        phase: ContextPhase | None = None,
        salt: bytes = b"",
        at_once: bool = False,
    ) -> RequestKey:
        """As `submit`, with everything said."""
        leg = leg or LEGS[self.role]
        waits = at_once and leg is RequestType.CONTEXT_ONLY
        context = HOLDER if at_once and leg is RequestType.GENERATION_ONLY else None
        alone = self.may_take_over and context is not None
        request = EngineRequest(key, leg, tuple(prompt), sampling, phase, None, salt, context, waits, alone)
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
        plan.make_copies(self.runner)
        for asked in self._asked:
            # What was said during the planning is sent after the copies. From then on a writer may be anywhere in these
            # blocks: whoever reads them before they are complete says nonsense.
            self.memory[asked.destinations[0].blocks] = 0xAA
        self._asked.clear()
        if plan.rows:
            self.layers.begin()
            try:
                drawn = self._executor.execute(plan.rows)
            except NonFiniteLogits as error:
                drawn, failed = error.drawn, error.rows
            self.now += 1.0
            self.rows.append(len(plan.rows))
            self.scheduler.apply(plan, drawn, frozenset(failed), self.now)
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
            self._asked.append(message)

    def deliver_send(self, key: RequestKey, failure: TransferFailure = TransferFailure.NONE) -> None:
        """The offer is over."""
        self.exposed.pop(key, None)  # nothing is, when it ends before its first chunk
        self.transceiver.deliver(SendOutcome(key, failure))

    def deliver_receive(
        self,
        key: RequestKey,
        failure: TransferFailure = TransferFailure.NONE,
        *,
        settled: bool = True,
        may_retry: bool = False,
    ) -> None:
        """The cache is here, or will not come."""
        if settled:
            del self.exposed[key]
        self.transceiver.deliver(ReceiveOutcome(key, settled, failure, "as told by the test", may_retry=may_retry))

    def messages(self, kind: type[SchedulerToHub]) -> list[SchedulerToHub]:
        """Messages of one kind, in order."""
        return [one for one in self.log if isinstance(one, kind)]

    def cancels(self, key: RequestKey) -> int:
        """How often the hub was told to cancel."""
        return sum(one.key == key for one in self.messages(CancelTransfer))

    # --- invariants

    def _event(self, event: SchedulerEvent) -> None:
        self.log.append(event)
        if isinstance(event, KvEvent):
            assert self.reusable.issuperset(event.removed), "a name is removed that nobody was told"
            self.reusable = (self.reusable - set(event.removed)) | set(event.stored)
            return
        trail = self.trails[event.key]
        assert not trail.released, f"{event} after the release"
        if isinstance(event, RequestReleased):
            assert trail.end is not None, "released before the client was told"
            assert event.key not in self.exposed, "released while a peer may touch the blocks"
            trail.released = True
        else:
            assert trail.end is None, f"{event} after the end"
            if isinstance(event, RequestTokens):
                trail.add(event.chunk)
                return
            if isinstance(event, RequestTookOver):
                assert not trail.answers, "said before the first token"
                assert trail.took_over is None, "said once"
                trail.took_over = event.reason
                return
            if isinstance(event, ContextDone):
                for chunk in event.first_tokens:
                    trail.add(chunk)
            trail.end = event

    def check(self) -> None:
        """Raises AssertionError when something that must always hold does not."""
        self.blocks.check_integrity()
        held = self.held_blocks()
        assert len(held) == self.blocks.used
        for key, blocks in self.exposed.items():
            assert held.issuperset(blocks.tolist()), f"blocks of {key} are free while a peer may touch them"
            assert any(
                set(self.blocks.table(holder).tolist()).issuperset(blocks.tolist()) for holder in self.holders(key)
            )
        live = {key for key, trail in self.trails.items() if not trail.released}
        assert self.scheduler.live == len(live)

    def holders(self, key: RequestKey) -> list[tuple[RequestKey, int | str]]:
        """Answers of a request that hold blocks."""
        return [(key, sample) for sample in (*range(16), "set aside") if self.blocks.held((key, sample))]

    def held(self, key: RequestKey) -> int:
        """Blocks of a request's answers, counted once for each answer."""
        return sum(self.blocks.held(holder) for holder in self.holders(key))

    def held_blocks(self) -> set[int]:
        """Blocks that any answer holds."""
        holders = [holder for key in self.trails for holder in self.holders(key)]
        return {block for holder in holders for block in self.blocks.table(holder).tolist()}

    def check_idle(self) -> None:
        """Nothing is left of anything, and readers know what is kept for reuse."""
        self.scheduler.check_idle()
        assert not self.step()
        assert self.blocks.used == 0
        assert all(trail.released and trail.end for trail in self.trails.values())
        assert not self.exposed
        assert len(self.reusable) == self.blocks.cached, "readers do not know"


def copy_cache(source: Bench, destination: Bench, key: RequestKey) -> None:
    """What the ranks do: the bytes of an offered prompt into the blocks that wait for it."""
    (offer,) = (one for one in source.messages(SendOffer) if one.key == key)
    *_, wanted = (one for one in destination.messages(ReceiveRequest) if one.key == key)
    assert isinstance(offer, SendOffer)
    assert isinstance(wanted, ReceiveRequest)
    assert offer.tokens.end == wanted.tokens.end
    (listed,), (held,) = wanted.destinations, offer.sources
    destination.memory[listed.blocks] = source.memory[held.blocks[-len(listed.blocks) :]]
