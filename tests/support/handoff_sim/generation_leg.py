"""What the scheduler of a generation instance does for its legs: exposes pages, agrees, decodes, frees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.ports import (
    BindFailed,
    Bound,
    FirstTokensArrived,
    Holder,
    ReceiveIntent,
    ReceiveRequest,
    TokenRange,
    TransferFailure,
)
from kvtransfer.session.receive import CONNECT_PATIENCE_S
from kvtransfer.transceiver.policy import Next

from .context_leg import first_tokens, lists
from .progress import check_intent_timeout, check_timeout
from .violation import Violation

if TYPE_CHECKING:
    from kvtransfer.ports import ReceiveOutcome, RequestKey

    from .attempt import Attempt
    from .node import Node
    from .pages import Hold
    from .schedule import Schedule

# Tick, steps and messages.
SLACK_S = 1.0


class GenerationLegs:
    """All generation legs of a schedule."""

    def __init__(self, schedule: Schedule, timeout_s: float) -> None:
        self._schedule, self._world = schedule, schedule.world
        # A client hears within this time after its generation leg has asked, or waits for its context leg.
        self._bound_s = timeout_s + min(CONNECT_PATIENCE_S, timeout_s) + SLACK_S
        self._intent_bound_s = timeout_s + SLACK_S

    def intend(self, attempt: Attempt) -> None:
        """generation_first: waits for the context leg, without pages."""
        generation = self._schedule.where[attempt.plan.generation]
        if not generation.alive:
            self._world.at(0.1, self.intend, attempt)
            return
        attempt.generation = generation
        generation.transceiver.intend_to_receive(ReceiveIntent(attempt.key, _holder(attempt.context)))
        self._world.note("intends", attempt.key, generation.name)
        self._world.at(self._intent_bound_s, self._intent_bound, attempt)

    def ask(self, attempt: Attempt) -> None:
        """Exposes fresh pages, as soon as there are some."""
        if attempt.received is not None:
            return
        plan, generation = attempt.plan, attempt.generation or self._schedule.where[attempt.plan.generation]
        hold = generation.pages.take(attempt.key, plan.blocks, self._world.now) if generation.alive else None
        if hold is None:
            self._world.at(0.1, self.ask, attempt)
            return
        attempt.generation, attempt.target = generation, hold
        group = generation.group(plan.number)
        tokens = TokenRange(plan.reused, plan.blocks)
        wanted = lists(hold.pages[plan.reused :], generation.shape.ranks(group))
        request = ReceiveRequest(attempt.key, tokens, wanted, _holder(attempt.context, attempt.src_dp), dp_rank=group)
        generation.transceiver.request_and_receive_async(request)
        self._world.note("ask", attempt.key, generation.name, hold.pages)
        self._world.at(self._bound_s, self._bound, attempt, hold)

    def cancel(self, attempt: Attempt, node: Node) -> None:
        """The client goes away. When nothing is in flight the attempt is over at once."""
        attempt.cancelled = True
        idle = node.transceiver.cancel_request(attempt.key)
        if idle and attempt.received is None:
            if attempt.target is not None and attempt.target.closed:
                node.pages.free(attempt.target)
            self._over(attempt, TransferFailure.CANCELLED)

    def step(self, node: Node) -> None:
        """Takes what has come for a scheduler."""
        for news in node.transceiver.check_bindings():
            attempt = self._schedule.attempts[news.key]
            self._world.note(type(news).__name__, news.key)
            match news:
                case Bound(_, dp_rank):
                    if dp_rank != attempt.src_dp:
                        raise Violation(f"{news.key} is bound to group {dp_rank}, computed by {attempt.src_dp}")
                    self.ask(attempt)
                case FirstTokensArrived(key, payload):
                    self._first_tokens(attempt, node, payload == first_tokens(key))
                case BindFailed(_, failure, _):
                    self._not_bound(attempt, node, failure)
        for outcome in node.transceiver.check_gen_transfer_status():
            self._received(node, outcome)

    def applied(self, node: Node, key: RequestKey, failure: TransferFailure) -> None:
        """Every rank has applied the decision on a request whose cache is there."""
        attempt = self._schedule.attempts[key]
        attempt.agreeing = False
        if failure is not TransferFailure.NONE and attempt.target is not None:
            node.pages.free(attempt.target)
            self._over(attempt, failure)
            return
        self._check_bytes(attempt)
        # Decoding goes on for a while; nobody may touch the pages.
        self._world.at(self._world.random.random() * 0.4, self._decoded, attempt)

    def _first_tokens(self, attempt: Attempt, node: Node, right: bool) -> None:
        if not right or attempt.first:
            raise Violation(f"{attempt.key} gets first tokens that are not its own, or twice")
        attempt.first = True
        if attempt.received is None and attempt.target is not None and attempt.target.closed:
            self._agree(attempt, node)

    def _not_bound(self, attempt: Attempt, node: Node, failure: TransferFailure) -> None:
        attempt.first_failed = failure
        target = attempt.target
        if attempt.received is not None:
            return
        if failure is TransferFailure.TIMED_OUT:
            check_intent_timeout(attempt, node)
        if target is None:
            self._over(attempt, failure)
        elif target.closed:
            node.pages.free(target)
            self._over(attempt, failure)

    def _received(self, node: Node, outcome: ReceiveOutcome) -> None:
        attempt = self._schedule.attempts[outcome.key]
        step, target = node.transceiver.next_step(outcome), attempt.target
        settled = "" if outcome.settled else "unsettled"
        self._world.note("received", outcome.key, outcome.failure.name, settled, step.name)
        if target is None or target.closed or attempt.received is not None or (attempt.told and not outcome.settled):
            raise Violation(f"attempt {outcome.key} has two outcomes of one kind")
        if outcome.failure is TransferFailure.TIMED_OUT and not attempt.told:
            check_timeout(attempt, node)
        attempt.told = attempt.told or step not in (Next.RETRY, Next.DECODE)
        if not outcome.settled:
            return
        target.close()
        if step is Next.DECODE:
            self._arrived(attempt, node, target)
            return
        node.pages.free(target)
        if step is Next.RETRY and attempt.first_failed is None and self._world.random.random() < 0.8:
            attempt.target = None
            self._world.at(self._world.random.random() * 0.3, self.ask, attempt)
            return
        if step is Next.RETRY:
            node.transceiver.give_up(attempt.key)
        self._over(attempt, outcome.failure)

    def _arrived(self, attempt: Attempt, node: Node, target: Hold) -> None:
        self._check_bytes(attempt)
        failed = TransferFailure.CANCELLED if attempt.cancelled else attempt.first_failed
        if failed is not None:
            node.pages.free(target)
            self._over(attempt, failed)
        elif attempt.first or not attempt.plan.generation_first:
            self._agree(attempt, node)

    def _agree(self, attempt: Attempt, node: Node) -> None:
        attempt.told, attempt.agreeing, attempt.received = True, True, TransferFailure.NONE
        self._schedule.agree(attempt)
        node.agreeing.start(attempt.key)

    def _decoded(self, attempt: Attempt) -> None:
        node, target = attempt.generation, attempt.target
        if node is None or target is None or not node.alive:
            return
        self._check_bytes(attempt)
        node.pages.free(target)
        self._schedule.finished(attempt, failed=False)

    def _over(self, attempt: Attempt, failure: TransferFailure) -> None:
        attempt.told, attempt.received = True, failure
        self._schedule.agree(attempt)
        self._schedule.finished(attempt, failed=True)

    def _check_bytes(self, attempt: Attempt) -> None:
        node, target = attempt.generation, attempt.target
        if node is None or target is None:
            return
        for number in node.shape.ranks(node.group(attempt.plan.number)):
            rank = node.ranks[number]
            for page in target.pages[attempt.plan.reused :]:
                if not rank.port.arena.holds(page, attempt.key):
                    raise Violation(f"{attempt.key} decodes from page {page} of {rank.port.name}: not its bytes")

    def _bound(self, attempt: Attempt, hold: Hold) -> None:
        unheard = attempt.target is hold and not (attempt.told or attempt.cancelled or hold.closed)
        if unheard and attempt.generation is not None and attempt.generation.alive:
            raise Violation(f"request {attempt.key} has heard nothing within its deadline")

    def _intent_bound(self, attempt: Attempt) -> None:
        """Bound, or told why not; and with the first tokens if the cache is there."""
        heard = attempt.first or attempt.first_failed is not None or attempt.told or attempt.cancelled
        if not heard and attempt.generation is not None and attempt.generation.alive:
            raise Violation(f"request {attempt.key} has heard nothing of its context leg within its deadline")


def _holder(context: Node, dp_rank: int = 0) -> Holder:
    return Holder(context.name, context.name, context.incarnation, dp_rank)
