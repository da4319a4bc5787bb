"""Requests in a hand-off: asking, offering, withdrawing, and what every outcome means for a request.

           ┌─ the cache is here ──▶ DECODE
           ├─ failed, once more ──▶ RECEIVING, on fresh pages
RECEIVING ─┼─ failed for good, recompute ──▶ WAITING: the prompt is computed here. Pages that a peer may still touch
           │                                 are set aside until they are settled.
           └─ failed for good, fail ──▶ RELEASED, or DRAINING until settled

When both legs of a request start at once, the generation leg is AWAITING until its context leg is scheduled (Bound), or
queues for its pages meanwhile and asks for the cache when it has both (`reserve_early`). It goes on when both the cache
and the first tokens are here. The context leg offers whole blocks after every step of its prefill, and says what it has
sampled before it offers the last ones: whoever has the whole cache can count on it. A generation leg whose context leg
is lost before it has said them goes on alone, as a request that was never divided, unless failed hand-offs shall fail.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError, InvalidRequest, TransferFailed
from isthmus_worker.engine import HandoffReport, RequestType, Tokens
from isthmus_worker.scheduler.answer import Answer, Phase
from isthmus_worker.scheduler.events import ContextDone, RequestTookOver
from kvtransfer.ports import BindFailed, Bound, FirstTokensArrived, TransferFailure
from kvtransfer.transceiver.policy import Next

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from isthmus_worker.scheduler.handoffs import Handoffs
    from isthmus_worker.scheduler.limits import Limits
    from isthmus_worker.scheduler.live import Live
    from isthmus_worker.scheduler.memory import Memory
    from isthmus_worker.scheduler.places import Places
    from isthmus_worker.scheduler.request import Request
    from kvtransfer.ports import BindNews, ReceiveOutcome, SendOutcome


class Transfers:
    """`offered`: context legs whose pages are held. `awaiting`: generation legs that wait for their context legs."""

    def __init__(self, handoffs: Handoffs, limits: Limits, live: Live, places: Places, memory: Memory) -> None:
        self._handoffs, self._limits, self._live = handoffs, limits, live
        self._places, self._memory = places, memory
        self.offered: set[RequestKey] = set()
        self.awaiting: set[RequestKey] = set()
        # Caches that have come, whole and on every rank, since the instance was idle.
        self.arrived = 0
        # The transceiver was asked to cancel and has not said yet that the blocks may be freed.
        self._cancelling: dict[RequestKey, Request] = {}
        # Legs that take their pages before their context legs are scheduled; None: they still queue for them.
        self._early: dict[RequestKey, Answer | None] = {}

    def may_hold(self, answer: Answer) -> bool:
        """True when the pages of a context leg may be held after its prefill, beside those that are held and those of
        legs that are computed now. One may always be."""
        if answer.request.leg is not RequestType.CONTEXT_ONLY:
            return True
        # What a bound leg has offered is counted as held already.
        size = self._memory.cache.tokens_per_block
        running = [self._prompt_blocks(one) - one.request.offered // size for one in self._places.running]
        if not running and not self.offered:
            return True
        return self._handoffs.can_hold(sum(running) + self._prompt_blocks(answer))

    def concerns(self, request: Request) -> bool:
        """True when a request that is dropped has to be withdrawn from its peer too: see `cancel`."""
        phase = request.lead.phase
        if phase is Phase.PREFILL:
            return request.bound
        return phase in (Phase.RECEIVING, Phase.OFFERED) or (request.awaits_first and phase is not Phase.DRAINING)

    def intend(self, request: Request) -> None:
        """A generation leg waits for the context leg that was started at the same time."""
        self._handoffs.intend(request)
        if not self._handoffs.reserve_early:
            self.awaiting.add(request.key)
            return
        self._early[request.key] = None
        request.lead.move(Phase.WAITING)
        self._places.enqueue(request.lead)

    def bind(self, request: Request) -> None:
        """A context leg that a generation leg waits for is scheduled. Of its prompt some may be here already."""
        request.bound = True
        self._handoffs.bind(request)
        self.offer_chunk(request)

    def offer_chunk(self, request: Request) -> None:
        """A bound context leg has computed more of its prompt: the blocks that are complete."""
        size = self._memory.cache.tokens_per_block
        end = request.lead.computed // size * size
        if end > request.offered:
            self._handoffs.offer(request, self._memory.offered_lists(request.lead, end), end)

    def offer_early(self, answer: Answer) -> None:
        """The step that has been planned computes the end of the prompt of a bound leg: its layers may be sent as they
        are computed. What was sampled is said after the step, as ever; a step that fails withdraws the request."""
        request = answer.request
        if request.bound and self._handoffs.by_layer and request.offered < request.prompt_length:
            lists = self._memory.offered_lists(answer, request.prompt_length)
            self._handoffs.offer(request, lists, request.prompt_length, early=True)

    def receive(self, answer: Answer) -> None:
        """Exposes the pages of a prompt and asks for its cache; keeps them while nobody can be asked yet."""
        if answer.request.key in self._early:
            self._early[answer.request.key] = answer
            return
        self._handoffs.receive(answer.request, *self._memory.received_lists(answer))

    def offer(self, request: Request, first_tokens: tuple[Tokens, ...]) -> None:
        """A context leg is done: its pages are held until somebody has fetched them."""
        self._places.pin(request.lead, Phase.OFFERED)
        self.offered.add(request.key)
        if request.bound:
            self._handoffs.send_first(request, first_tokens)
        if request.offered < request.prompt_length:
            lists = self._memory.offered_lists(request.lead, request.prompt_length)
            self._handoffs.offer(request, lists, request.prompt_length)
        request.over = True
        self._live.emit(ContextDone(request.key, first_tokens, request.report(), self._handoffs.dp_rank))

    def ended(self, request: Request, first_tokens: tuple[Tokens, ...]) -> None:
        """The first tokens of a bound context leg end every answer: nothing is handed off."""
        self._handoffs.send_first(request, first_tokens)
        self._live.finish(request, None)
        self.cancel(request)

    def cancel(self, request: Request) -> None:
        """A request that is dropped in a hand-off. Its blocks are free when no peer can touch them."""
        if self._handoffs.cancel(request.key) or request.set_aside:
            self._release(request)
            return
        self._places.pin(request.lead, Phase.DRAINING)
        self.offered.discard(request.key)
        self._cancelling[request.key] = request

    def poll(self) -> None:
        """Applies what the transceiver has heard."""
        for news in self._handoffs.bindings():
            self._heard(news)
        for send in self._handoffs.sends():
            self._sent(send)
        for outcome in self._handoffs.receives():
            self._received(self._find(outcome.key, Phase.RECEIVING), outcome)
        for request in list(self._cancelling.values()):
            if self._handoffs.cancel(request.key):
                self._release(request)

    def _heard(self, news: BindNews) -> None:
        request = self._live.requests.get(news.key)
        if request is None or request.over:
            return  # it has failed otherwise meanwhile
        match news:
            case Bound():
                request.context_dp = news.dp_rank
                if request.key in self._early:
                    answer = self._early.pop(request.key)
                    if answer is not None:
                        self.receive(answer)
                    return
                self.awaiting.discard(request.key)
                request.lead.move(Phase.WAITING)
                self._places.enqueue(request.lead)
            case FirstTokensArrived(_, payload):
                self._first(request, payload)
            case BindFailed():
                self._unbound(request, news)

    def _unbound(self, request: Request, news: BindFailed) -> None:
        if not self._handoffs.may_take_over(request, news):
            self._live.finish(request, self._handoffs.unbound(request, news))
            self.cancel(request)
            return
        request.alone = True
        reason = news.reason or news.failure.name.lower().replace("_", " ")
        if not request.recomputed:
            request.handoff_failures.append(reason)
        self._live.emit(RequestTookOver(request.key, reason))
        waits_early, lead = request.key in self._early, request.lead
        self._early.pop(request.key, None)
        if lead.phase is Phase.RECEIVING and (waits_early or request.received):
            self._recompute(request, settled=True)
        elif lead.phase is not Phase.RECEIVING:  # what was asked for has its own outcome
            request.received = request.recomputed = True
            if lead.phase is Phase.AWAITING:
                self._compute_here(request)

    def _first(self, request: Request, payload: bytes) -> None:
        try:
            first = self._handoffs.first_tokens(request, payload)
            self._limits.check_first_tokens(first, request.source.sampling)
        except (TransferFailed, InvalidRequest) as error:
            self._live.finish(request, error)
            self.cancel(request)
            return
        request.first = first
        if all(one.reason is not None for one in first):
            self._live.finish(request, None)
            self.cancel(request)
        elif request.lead.phase is Phase.AWAITING:
            self._compute_here(request)
        elif request.received:
            self._go_on(request)

    def _sent(self, send: SendOutcome) -> None:
        request = self._find(send.key, Phase.OFFERED)
        if request.lead.phase is Phase.PREFILL:
            # The other leg has gone, or can not be reached: nobody will take what is being computed.
            reason = send.reason or send.failure.name.lower().replace("_", " ")
            self._live.finish(request, TransferFailed(request.key, "this instance", reason))
        self._release(request)

    def _received(self, request: Request, outcome: ReceiveOutcome) -> None:
        step, lead = self._handoffs.next_step(outcome), request.lead
        waiting = lead.phase is Phase.RECEIVING
        if waiting and outcome.failure is not TransferFailure.NONE and not request.alone:
            request.handoff_failures.append(outcome.reason or outcome.failure.name.lower().replace("_", " "))
        if step is Next.RETRY:
            if waiting and not request.alone and self._memory.renew(lead):
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
                if outcome.settled and request.awaits_first:
                    self._handoffs.cancel(request.key)
            if outcome.settled:
                self._cancelling.pop(request.key, None)
                self._live.settled(request)
            elif waiting:
                self._places.pin(lead, Phase.DRAINING)

    def _arrived(self, request: Request, outcome: ReceiveOutcome) -> None:
        lead, stats = request.lead, outcome.stats
        request.handoff = None if stats is None else HandoffReport(stats.writers, stats.total)
        request.received = True
        self.arrived += 1
        lead.computed = request.prompt_length
        self._memory.commit(lead)
        if request.alone:
            # The last token has to be computed; what has arrived is found again.
            self._recompute(request, settled=True)
        elif not request.awaits_first:
            self._go_on(request)

    def _go_on(self, request: Request) -> None:
        """The cache and the first tokens are here."""
        lead, reason = request.lead, None
        if request.source.context is not None and request.first is not None:
            reason = request.take_first(request.first).reason
        lead.move(Phase.DECODE)
        self._live.part(request)
        if reason is not None:
            self._live.end(lead)

    def _recompute(self, request: Request, *, settled: bool) -> None:
        request.received = request.recomputed = True
        if not settled:
            request.set_aside = True
            self._memory.set_aside(request.lead)
        self._places.requeue(request.lead)
        if request.source.context is not None and not request.alone:
            self._places.drop(request.lead)
            request.start(Phase.AWAITING)
            if request.first is None:
                self.awaiting.add(request.key)
            else:
                self._compute_here(request)

    def _compute_here(self, request: Request) -> None:
        """No hand-off came through. Which answers go on is known now, and one of them takes the lead."""
        self.awaiting.discard(request.key)
        request.start(Phase.AWAITING)
        request.lead.move(Phase.WAITING)
        self._places.enqueue(request.lead)

    def _release(self, request: Request) -> None:
        self.offered.discard(request.key)
        self.awaiting.discard(request.key)
        self._early.pop(request.key, None)
        self._cancelling.pop(request.key, None)
        self._live.release(request)

    def _find(self, key: RequestKey, phase: Phase) -> Request:
        """The request that an outcome is about. Its blocks are pinned, so it is here."""
        request = self._live.requests.get(key)
        bound = request is not None and request.bound and request.lead.phase is Phase.PREFILL
        if request is None or not (bound or request.set_aside or request.lead.phase in (phase, Phase.DRAINING)):
            where = "gone" if request is None else request.lead.phase.value
            raise InternalError(f"request {key} is {where} and got the outcome of a hand-off")
        return request

    def _prompt_blocks(self, answer: Answer) -> int:
        return self._memory.blocks_for(answer.request.prompt_length)
