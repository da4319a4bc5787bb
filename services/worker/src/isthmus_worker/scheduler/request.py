"""One request in the scheduler: its answers and its time stamps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_worker.engine import FinishReason, HandoffReport, LegReport, RequestType, Tokens
from isthmus_worker.marks import MAX_MARKS, Mark, MarkKind
from isthmus_worker.runner import Draw
from isthmus_worker.scheduler.answer import Answer, Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from isthmus_worker.engine import EngineRequest
    from isthmus_worker.runner import Drawn


class Request:
    """Mutable state of one request; only the scheduler changes it.

    There is one prefill, or one hand-off, for all answers: it is the `lead` answer's. `unborn`: the answers that part
    from it when it is over, with the tokens that they begin with. `answers`: those that are there and go on.
    """

    __slots__ = (
        "accepted_drafts",
        "admitted_at",
        "alone",
        "answers",
        "arrival",
        "bound",
        "cached_tokens",
        "context_dp",
        "decode_from",
        "drafts",
        "first",
        "handoff",
        "handoff_failures",
        "key",
        "last_token_at",
        "lead",
        "leg_tokens",
        "marks",
        "offered",
        "over",
        "prefilled_at",
        "received",
        "recomputed",
        "set_aside",
        "source",
        "stop",
        "submitted_at",
        "unborn",
    )

    def __init__(self, request: EngineRequest, arrival: int, now: float) -> None:
        phase = request.context_phase
        self.source = request
        self.key = request.key
        self.arrival = arrival
        self.stop = frozenset(request.sampling.stop_token_ids)
        # Generation leg: what the context leg has sampled, as soon as it is known.
        self.first = None if phase is None else phase.first_tokens
        self.start(Phase.WAITING if request.context is None else Phase.AWAITING)
        # Context leg whose pages a generation leg may ask for since it was scheduled. Prompt tokens that are offered.
        self.bound = False
        self.offered = 0
        # Generation leg: the attention-dp group of the context instance that has its prompt.
        self.context_dp = 0 if phase is None else phase.holder.dp_rank
        # Guesses that were tried, and the right ones among them.
        self.drafts = self.accepted_drafts = 0
        # Tokens made by this leg.
        self.leg_tokens = 0
        # The client's side is over.
        self.over = False
        # Generation leg: the cache has been here, so that a preemption is followed by computing, not by a hand-off.
        self.received = False
        # Its context leg will not tell the first tokens any more: they are drawn here, as for an unsplit request.
        self.alone = False
        # It failed for good: the prompt is computed here. Its pages are set aside while a peer may still touch them.
        self.recomputed = self.set_aside = False
        self.handoff_failures: list[str] = []
        # Prompt tokens whose KV was here when the prefill began.
        self.cached_tokens: int | None = None
        self.submitted_at = now
        self.admitted_at: float | None = None
        self.prefilled_at: float | None = None
        self.decode_from: float | None = None
        self.last_token_at: float | None = None
        self.marks: list[Mark] = []
        self.handoff: HandoffReport | None = None

    def start(self, phase: Phase) -> None:
        """An answer without blocks takes the lead: the first one that goes on, as far as that is known."""
        chunks = self.first or [Tokens((), sample) for sample in range(self.source.sampling.n)]
        lead, *rest = [one for one in chunks if one.reason is None]
        self.lead = Answer(self, lead.sample, lead.ids, phase)
        self._guess(lead)
        self.unborn: list[Tokens] = rest
        self.answers: list[Answer] = [self.lead]

    def take_first(self, first: tuple[Tokens, ...]) -> Tokens:
        """First tokens that come when the lead answer has blocks already; returns its own."""
        own, *self.unborn = first
        for token in own.ids:
            self.lead.append(token)
        self._guess(own)
        return own

    def _guess(self, first: Tokens) -> None:
        """Drafts of a request with one answer, as far as it may get when one token more than them is right."""
        if self.source.sampling.n == 1:
            self.lead.drafts = first.drafts[: max(0, self.source.sampling.max_tokens - len(first.ids) - 1)]

    @property
    def leg(self) -> RequestType:
        """Which leg of a request this is."""
        return self.source.request_type

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.source.prompt)

    @property
    def said_from(self) -> int:
        """Where the answer begins: before the end of the prompt when an earlier try has made some of it."""
        return len(self.source.prompt) - self.source.sampling.resumed

    @property
    def needs_cache(self) -> bool:
        """True when the KV of the prompt comes from a context instance."""
        return self.leg is RequestType.GENERATION_ONLY and not self.received

    @property
    def knows_first(self) -> bool:
        """True when the first tokens were drawn elsewhere: by the context leg."""
        return self.leg is RequestType.GENERATION_ONLY and not self.alone

    @property
    def awaits_first(self) -> bool:
        """True for a generation leg that its context leg has not told the first tokens yet, and still may."""
        return self.source.context is not None and self.first is None and not self.alone

    def parting(self, answer: Answer) -> list[Tokens]:
        """Answers that will take places and blocks of their own beside this one, once it has its first token."""
        return self.unborn if answer is self.lead and self.leg is not RequestType.CONTEXT_ONLY else []

    def draws(self, answer: Answer) -> tuple[Draw, ...]:
        """What is wanted of the logits after all tokens of an answer: its next token, and the first ones of those that
        part from it."""
        sampling = self.source.sampling
        sample, count = sampling.first_sample + answer.sample, len(answer.proposed)
        if count:
            places = range(count + 1)
            return tuple(Draw(sampling, sample, answer.prompt(), answer.output(at), count - at) for at in places)
        own = Draw(sampling, sample, answer.prompt(), answer.output())
        if answer is not self.lead or not self.unborn or self.knows_first:
            return (own,)
        # None of them has an output yet.
        return (own, *(Draw(sampling, one.sample, own.prompt, own.output) for one in self.unborn))

    def chunk(self, sample: int, drawn: Drawn, generated: int) -> Tokens:
        """A drawn token, the `generated`th of its answer, as the client gets it."""
        reason = None
        if drawn.token in self.stop:
            reason = FinishReason.STOP
        elif generated == self.source.sampling.max_tokens:
            reason = FinishReason.LENGTH
        return Tokens((drawn.token,), sample, () if drawn.logprobs is None else (drawn.logprobs,), reason)

    def took(self, count: int, now: float) -> None:
        """A step has drawn `count` tokens of this leg."""
        self.leg_tokens += count
        self.last_token_at = now
        if self.prefilled_at is None and not self.knows_first:
            self.prefilled_at = now

    def report(self) -> LegReport:
        """Where the time of this leg went so far."""
        admitted, generation = self.admitted_at, self.leg is RequestType.GENERATION_ONLY
        queued = None if admitted is None else admitted - self.submitted_at
        first = 0 if self.knows_first or not self.leg_tokens else self.source.sampling.n
        return LegReport(
            context_queue=None if generation else queued,
            prefill=_between(admitted, self.prefilled_at),
            handoff=self.handoff,
            generation_queue=queued if generation else None,
            decode=_between(self.decode_from, self.last_token_at),
            decode_tokens=self.leg_tokens - first,
            cached_tokens=self.cached_tokens or 0,
            handoff_failures=tuple(self.handoff_failures),
            recomputed=self.recomputed,
            draft_tokens=self.drafts,
            accepted_draft_tokens=self.accepted_drafts,
            marks=tuple(self._marks()),
        )

    def preempted(self) -> None:
        """It has given its blocks back, after its last step."""
        if self.last_token_at is not None and len(self.marks) < MAX_MARKS:
            self.marks.append(Mark(MarkKind.PREEMPTED, self.last_token_at))

    def _marks(self) -> Iterator[Mark]:
        """In order of their beginnings, nearly: a preempted request goes back to computing chunks."""
        if self.admitted_at is not None:
            yield Mark(MarkKind.QUEUE, self.submitted_at, self.admitted_at - self.submitted_at)
        yield from self.marks
        if self.prefilled_at is not None:
            yield Mark(MarkKind.FIRST_TOKEN, self.prefilled_at)
        if (decoding := _between(self.decode_from, self.last_token_at)) is not None and self.decode_from is not None:
            yield Mark(MarkKind.DECODE, self.decode_from, decoding)


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds; None when one of the two has not happened, or not in this order (the first decode step is running)."""
    return None if begin is None or end is None or end < begin else end - begin
