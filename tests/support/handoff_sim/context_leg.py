"""What the scheduler of a context instance does for its legs: admits, computes, offers, frees."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.ports import RankBlocks, RequestKey, TokenRange

from .attempt import Attempt
from .progress import check_expiry
from .violation import Violation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.ports import SendOutcome

    from .node import Node
    from .pages import Hold
    from .schedule import Schedule
    from .script import RequestPlan


class ContextLegs:
    """All context legs of a schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule, self._world = schedule, schedule.world

    def prefill(self, plan: RequestPlan, number: int) -> None:
        """context_first: the generation leg is started when there is something to hand off."""
        context, key = self._schedule.where[plan.context], _key(plan, number)
        hold = self._admit(context, key, plan.blocks)
        if hold is None:
            self._world.at(0.1, self.prefill, plan, number)
            return
        attempt = self._schedule.attempts[key] = Attempt(plan, key, context, hold)
        self._compute(attempt, 1 if plan.chunked else plan.blocks)
        self._world.at(plan.asks_after, self._schedule.generation_legs.ask, attempt)

    def both(self, plan: RequestPlan, number: int) -> None:
        """generation_first: both legs are started, each comes in its own time."""
        context, key = self._schedule.where[plan.context], _key(plan, number)
        if not context.alive:
            self._world.at(0.1, self.both, plan, number)
            return
        attempt = self._schedule.attempts[key] = Attempt(plan, key, context)
        random = self._world.random.random
        self._world.at(random() * 0.1, self._schedule.generation_legs.intend, attempt)
        self._world.at(plan.asks_after if plan.asks_after > 1 else random() * 0.3, self._bind, attempt)

    def step(self, node: Node) -> None:
        """Takes what has come for a scheduler."""
        for outcome in node.transceiver.check_context_transfer_status():
            self._sent(node, outcome)

    def _admit(self, context: Node, key: RequestKey, blocks: int) -> Hold | None:
        if not context.alive or not context.transceiver.can_hold(blocks):
            return None
        hold = context.pages.take(key, blocks, self._world.now)
        if hold is not None:
            context.transceiver.prepare_context_requests([key])
        return hold

    def _bind(self, attempt: Attempt) -> None:
        # The router cancels the context leg of a generation leg that has failed.
        if attempt.withdrawn or attempt.received is not None or not attempt.context.alive:
            return
        hold = self._admit(attempt.context, attempt.key, attempt.plan.blocks)
        if hold is None:
            self._world.at(0.1, self._bind, attempt)
            return
        attempt.source = hold
        attempt.context.transceiver.bind_context(attempt.key, attempt.src_dp)
        self._world.note("binds", attempt.key, attempt.context.name)
        first = 1 if attempt.plan.chunked else attempt.plan.blocks
        self._world.at(self._world.random.random() * 0.2, self._compute, attempt, first)

    def _compute(self, attempt: Attempt, blocks: int) -> None:
        """The prompt has been computed up to here. Goes on until the offer has ended, or all is computed."""
        context, source, plan = attempt.context, attempt.source, attempt.plan
        if not context.alive or attempt.sent is not None or source is None:
            return
        ranks = context.shape.ranks(attempt.src_dp)
        for rank in ranks:
            context.ranks[rank].port.arena.fill(source.pages[:blocks], attempt.key)
        tokens = TokenRange(blocks - 1 if plan.chunked else 0, blocks)
        last = blocks == plan.blocks
        sources = lists(source.pages[:blocks], ranks)
        context.transceiver.respond_and_send_async(attempt.key, tokens, sources, is_last=last, dp_rank=attempt.src_dp)
        self._world.note("offer", attempt.key, context.name, source.pages[:blocks], "" if last else "and more")
        if not last:
            self._world.at(self._world.random.random() * 0.2, self._compute, attempt, blocks + 1)
            return
        attempt.computed = self._world.now
        if plan.generation_first:
            context.transceiver.send_first_tokens(attempt.key, first_tokens(attempt.key))

    def _sent(self, node: Node, outcome: SendOutcome) -> None:
        attempt = self._schedule.attempts[outcome.key]
        self._world.note("sent", outcome.key, outcome.failure.name)
        if attempt.sent is not None or attempt.source is None:
            raise Violation(f"the offer {outcome.key} has ended twice")
        attempt.sent = outcome.failure
        check_expiry(attempt, calm=self._schedule.faults.calm)
        self._schedule.agree(attempt)
        attempt.source.close()
        node.pages.free(attempt.source)


def lists(pages: list[int], ranks: Sequence[int]) -> tuple[RankBlocks, ...]:
    """The same pages on every rank of a group."""
    ids = np.array(pages, np.int32)
    return tuple(RankBlocks(rank, 0, ids) for rank in ranks)


def first_tokens(key: RequestKey) -> bytes:
    """What the prefill of an attempt samples."""
    return b"%d/%d" % (key.request_id, key.attempt)


def _key(plan: RequestPlan, number: int) -> RequestKey:
    return RequestKey((1 << 40) + plan.number, number)
