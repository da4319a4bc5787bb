"""Requests in a hand-off: asking, offering, withdrawing, and what every outcome means for a request.

           ┌─ the cache is here ──▶ DECODE
           ├─ failed, once more ──▶ RECEIVING, on fresh pages
RECEIVING ─┼─ failed for good, recompute ──▶ WAITING: the prompt is computed here. Pages that a peer may still touch
           │                                 are set aside until they are settled.
           └─ failed for good, fail ──▶ RELEASED, or DRAINING until settled
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError
from isthmus_worker.engine import HandoffReport, RequestType, Tokens
from isthmus_worker.scheduler.answer import Answer, Phase
from isthmus_worker.scheduler.events import ContextDone
from kvtransfer.ports import TransferFailure
from kvtransfer.transceiver.policy import Next

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from isthmus_worker.scheduler.handoffs import Handoffs
    from isthmus_worker.scheduler.live import Live
    from isthmus_worker.scheduler.memory import Memory
    from isthmus_worker.scheduler.places import Places
    from isthmus_worker.scheduler.request import Request
    from kvtransfer.ports import ReceiveOutcome


class Transfers:
    """`offered`: context legs whose pages are held."""

    def __init__(self, handoffs: Handoffs, live: Live, places: Places, memory: Memory) -> None:
        self._handoffs, self._live, self._places, self._memory = handoffs, live, places, memory
        self.offered: set[RequestKey] = set()
        # The transceiver was asked to cancel and has not said yet that the blocks may be freed.
        self._cancelling: dict[RequestKey, Request] = {}

    def may_hold(self, answer: Answer) -> bool:
        """True when the pages of a context leg may be held after its prefill, beside those that are held and those of
        legs that are computed now. One may always be."""
        if answer.request.leg is not RequestType.CONTEXT_ONLY:
            return True
        running = [self._prompt_blocks(one) for one in self._places.running]
        if not running and not self.offered:
            return True
        return self._handoffs.can_hold(sum(running) + self._prompt_blocks(answer))

    def receive(self, answer: Answer) -> None:
        """Exposes the pages of a prompt and asks for its cache."""
        self._handoffs.receive(answer.request, self._memory.prompt_table(answer))

    def offer(self, request: Request, first_tokens: tuple[Tokens, ...]) -> None:
        """A context leg is done: its pages are held until somebody has fetched them."""
        self._places.pin(request.lead, Phase.OFFERED)
        self.offered.add(request.key)
        self._handoffs.offer(request, self._memory.prompt_table(request.lead))
        request.over = True
        self._live.emit(ContextDone(request.key, first_tokens, request.report()))

    def cancel(self, request: Request) -> None:
        """A request that is dropped in a hand-off. Its blocks are free when no peer can touch them."""
        if self._handoffs.cancel(request.key):
            self._release(request)
            return
        self._places.pin(request.lead, Phase.DRAINING)
        self.offered.discard(request.key)
        self._cancelling[request.key] = request

    def poll(self) -> None:
        """Applies what the transceiver has heard."""
        for send in self._handoffs.sends():
            self._release(self._find(send.key, Phase.OFFERED))
        for outcome in self._handoffs.receives():
            self._received(self._find(outcome.key, Phase.RECEIVING), outcome)
        for request in list(self._cancelling.values()):
            if self._handoffs.cancel(request.key):
                self._release(request)

    def _received(self, request: Request, outcome: ReceiveOutcome) -> None:
        step, lead = self._handoffs.next_step(outcome), request.lead
        waiting = lead.phase is Phase.RECEIVING
        if waiting and outcome.failure is not TransferFailure.NONE:
            request.handoff_failures.append(outcome.reason or outcome.failure.name.lower().replace("_", " "))
        if step is Next.RETRY:
            if waiting and self._memory.renew(lead):
                self.receive(lead)
                return
            step = self._handoffs.give_up(request.key)
        if waiting and step is Next.DECODE:
            self._arrived(request, outcome)
        elif waiting and step is Next.RECOMPUTE:
            self._recompute(request, settled=outcome.settled)
        else:
            if waiting:  # also when the other side has withdrawn it: a client is always told
                self._live.finish(request, self._handoffs.error(request, outcome))
            if outcome.settled:
                self._cancelling.pop(request.key, None)
                self._live.settled(request)
            elif waiting:
                self._places.pin(lead, Phase.DRAINING)

    def _arrived(self, request: Request, outcome: ReceiveOutcome) -> None:
        lead, stats = request.lead, outcome.stats
        request.handoff = None if stats is None else HandoffReport(stats.writers, stats.total)
        request.received = True
        lead.computed = request.prompt_length
        lead.partial = not self._handoffs.brings_all(request)
        self._memory.commit(lead)
        lead.move(Phase.DECODE)
        self._live.part(request)

    def _recompute(self, request: Request, *, settled: bool) -> None:
        request.received = request.recomputed = True
        if not settled:
            request.set_aside = True
            self._memory.set_aside(request.lead)
        self._places.requeue(request.lead)

    def _release(self, request: Request) -> None:
        self.offered.discard(request.key)
        self._cancelling.pop(request.key, None)
        self._live.release(request)

    def _find(self, key: RequestKey, phase: Phase) -> Request:
        """The request that an outcome is about. Its blocks are pinned, so it is here."""
        request = self._live.requests.get(key)
        if request is None or not (request.set_aside or request.lead.phase in (phase, Phase.DRAINING)):
            where = "gone" if request is None else request.lead.phase.value
            raise InternalError(f"request {key} is {where} and got the outcome of a hand-off")
        return request

    def _prompt_blocks(self, answer: Answer) -> int:
        return self._memory.blocks.blocks_for(answer.request.prompt_length)
