"""A context and a generation scheduler whose legs start at once, and a stand-in for the two hubs between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from isthmus_core.errors import IsthmusError
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import KvEvent, Sampling
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    Bound,
    CancelTransfer,
    FirstTokensArrived,
    ReceiveIntent,
    ReceiveRequest,
    SendFirstTokens,
    SendOffer,
    TransferFailure,
)
from kvtransfer.transceiver.policy import HandoffPolicy
from sched_bench import Bench, new_key

CANCELLED = TransferFailure.CANCELLED


@dataclass
class Wire:
    """What the two hubs know of one attempt. `chunks`: offers in order. `copied`: how many have been written."""

    intent: bool = False
    bound: bool = False
    told_bound: bool = False
    first: bytes | None = None
    wanted: ReceiveRequest | None = None
    chunks: list[SendOffer] = field(default_factory=list[SendOffer])
    copied: int = 0
    failed: bool = False
    send_over: bool = False
    receive_over: bool = False


class Pair:
    """`turn` is one step of both schedulers and of the hubs. With `write` False nothing is written: the cache waits
    unless nobody has it any more."""

    def __init__(self, *, policy: HandoffPolicy | None = None, write: bool = True, **options: Any) -> None:
        self.context = Bench("context", **options)
        self.generation = Bench("generation", policy=policy, **options)
        self.write = write
        self.wires: dict[RequestKey, Wire] = {}
        self._read = {id(self.context): 0, id(self.generation): 0}

    def submit(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> RequestKey:
        """Both legs."""
        key = new_key()
        self.wires[key] = Wire()
        self.generation.submit(prompt, max_tokens, key=key, at_once=True, **options)
        try:
            self.context.submit(prompt, max_tokens, key=key, at_once=True, **options)
        except IsthmusError:
            self.generation.abort(key)
            raise
        return key

    def submit_as(self, prompt: Sequence[int], sampling: Sampling) -> RequestKey:
        """Both legs, with everything said."""
        key = new_key()
        self.wires[key] = Wire()
        for side in (self.generation, self.context):
            side.submit_as(prompt, sampling, key=key, at_once=True)
        return key

    def turn(self) -> bool:
        """False when nothing happened."""
        busy = self.context.step()
        busy |= self._relay(self.context)
        busy |= self.generation.step()
        return busy | self._relay(self.generation)

    def run(self) -> None:
        """Until nothing happens."""
        for _ in range(1000):
            if not self.turn():
                return
        raise AssertionError("does not come to rest")

    def text(self, key: RequestKey, sample: int = 0) -> list[int]:
        """Of one answer, from both legs, or from the one that goes on alone."""
        ends = (self.context.trails[key], self.generation.trails[key])
        if ends[1].took_over is not None:
            return ends[1].answers.get(sample, [])
        return [token for trail in ends for token in trail.answers.get(sample, [])]

    def check_idle(self) -> None:
        """Nothing is left on either side."""
        self.context.check_idle()
        self.generation.check_idle()

    def fail(self, key: RequestKey, *, settled: bool = True, may_retry: bool = False) -> None:
        """The receive that is open fails, and what has been written is lost. The context side keeps its pages for
        another one, or is told that they were not taken, once it has offered the last of them."""
        wire = self.wires[key]
        may_retry = may_retry and wire.wanted is not None and wire.wanted.may_retry
        wire.wanted, wire.copied, wire.failed = None, 0, not may_retry
        wire.receive_over = not may_retry
        self.generation.deliver_receive(key, TransferFailure.WRITE_FAILED, settled=settled, may_retry=may_retry)

    def _relay(self, side: Bench) -> bool:
        """What one side has said since the last time."""
        new = side.log[self._read[id(side)] :]
        self._read[id(side)] = len(side.log)
        for message in new:
            if not isinstance(message, KvEvent):
                self._hear(side, self.wires[message.key], message)
        for key, wire in self.wires.items():
            self._bind(key, wire)
            if self.write or wire.send_over:
                self._write(key, wire)
        return bool(new)

    def _hear(self, side: Bench, wire: Wire, message: object) -> None:
        match message:
            case BindContext():
                wire.bound = True
            case SendFirstTokens(key, payload):
                wire.first = payload
                if wire.told_bound and wire.intent:
                    self._tell_first(key, wire, payload)
            case SendOffer():
                wire.chunks.append(message)
            case ReceiveIntent():
                wire.intent = True
            case ReceiveRequest():
                wire.wanted = message
            case CancelTransfer(key):
                self._cancel(side, key, wire)
            case _:
                pass

    def _tell_first(self, key: RequestKey, wire: Wire, payload: bytes) -> None:
        wire.intent = False
        self.generation.transceiver.deliver(FirstTokensArrived(key, payload))

    def _bind(self, key: RequestKey, wire: Wire) -> None:
        if wire.intent and wire.bound and not wire.told_bound:
            wire.told_bound = True
            self.generation.transceiver.deliver(Bound(key, 0))
            if wire.first is not None:
                self._tell_first(key, wire, wire.first)

    def _write(self, key: RequestKey, wire: Wire) -> None:
        whole = bool(wire.chunks) and not wire.chunks[-1].more
        if wire.failed and whole and not wire.send_over:
            wire.send_over = True
            self.context.deliver_send(key, TransferFailure.WRITE_FAILED)
        if wire.wanted is None or wire.receive_over:
            return
        if wire.send_over:
            wire.receive_over = True
            self.generation.deliver_receive(key, TransferFailure.NOT_HELD)
            return
        size = self.context.blocks.tokens_per_block
        (listed,) = wire.wanted.destinations
        reused = listed.begin // size
        source_memory = self.context.memory
        for offer in wire.chunks[wire.copied :]:
            begin = max(offer.tokens.begin // size, reused)
            end = max(begin, -(-offer.tokens.end // size))
            source = np.asarray(offer.sources[0].blocks)[begin:end]
            self.generation.memory[listed.blocks[begin - reused : end - reused]] = source_memory[source]
            wire.copied += 1
        if whole:
            wire.receive_over = wire.send_over = True
            self.generation.deliver_receive(key)
            self.context.deliver_send(key)

    def _cancel(self, side: Bench, key: RequestKey, wire: Wire) -> None:
        """Either side's cancel ends what is open on both."""
        if side is self.generation:
            wire.intent = False
        if (wire.bound or wire.chunks) and not wire.send_over:
            wire.send_over = True
            self.context.deliver_send(key, CANCELLED)
        if wire.intent and wire.first is None:
            wire.intent = False
            self.generation.transceiver.deliver(BindFailed(key, TransferFailure.NOT_HELD, "withdrawn"))
        if wire.wanted is not None and not wire.receive_over:
            wire.receive_over = True
            gone = CANCELLED if side is self.generation else TransferFailure.NOT_HELD
            self.generation.deliver_receive(key, gone)
