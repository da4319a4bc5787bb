"""What vLLM says about one leg as the engine's own events. Takes vLLM's objects as they are, imports none.

context       first token ─▶ ContextDone (its blocks are offered), or the answer's end
generation    tokens, without the first one ─▶ end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from isthmus_core.errors import InternalError, RequestCancelled, TransferFailed
from isthmus_worker.engine import EngineRequest, FinishReason, LegReport, RequestType, TokenLogprobs, Tokens
from isthmus_worker.scheduler.events import ContextDone, RequestFinished, RequestTokens
from isthmus_worker.vllm_engine.sampling import hands_off, prompts

if TYPE_CHECKING:
    from isthmus_core.errors import IsthmusError
    from isthmus_worker.scheduler.events import SchedulerEvent

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class LegOutput:
    """One leg. `clock` in seconds, monotonic. `handed_off`: its cache is offered and it is over here. `alone`: its
    cache did not come, the prompt is computed here; `lost`: or it fails with this."""

    def __init__(self, request: EngineRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self._request, self._clock = request, clock
        self._began = clock()
        self._first: float | None = None
        self._tokens = 0
        self._cached = 0
        self._open = len(prompts(request))
        self._dropped: set[int] = set()
        # Of a context leg, by answer; and whether its cache is offered.
        self._sampled: dict[int, Tokens] = {}
        self._offered = False
        self.handed_off = self.alone = False
        self.lost: IsthmusError | None = None

    def events(self, output: Any, answer: int = 0) -> list[SchedulerEvent]:
        """A RequestOutput with the tokens that are new of answer `answer`. Raises IsthmusError when
        vLLM has ended the leg."""
        if answer in self._dropped:
            return []
        if self._first is None:
            self._first = self._clock()
        self._cached = max(self._cached, int(output.num_cached_tokens or 0))
        if hands_off(self._request):
            return self._handed_off(output, answer)
        return self._went_on(output, answer)

    @property
    def has_spoken(self) -> bool:
        """True when the leg has a token: its cache has come."""
        return self._first is not None

    def lose(self, reason: str, *, recompute: bool) -> None:
        """The cache does not come. Where the first token is not known nobody can go on."""
        phase, context = self._request.context_phase, self._request.context
        if recompute and phase is not None:
            self.alone = True
        elif (holder := context if phase is None else phase.holder) is not None:
            self.lost = TransferFailed(self._request.key, holder.instance_id, reason)

    def drop(self, answer: int) -> list[SchedulerEvent]:
        """The answer has ended with its first token, elsewhere."""
        if answer in self._dropped:
            return []
        self._dropped.add(answer)
        self._open -= 1
        return [] if self._open else [RequestFinished(self._request.key, None, self.report())]

    def is_dropped(self, answer: int) -> bool:
        """True when what vLLM says of the answer is for nobody."""
        return answer in self._dropped

    def failed(self, error: IsthmusError) -> RequestFinished:
        """The leg's end by an error."""
        return RequestFinished(self._request.key, error, self.report())

    def report(self) -> LegReport:
        """Where the time went, as far as it can be seen from here."""
        now = self._clock()
        first = now if self._first is None else self._first
        if self._request.request_type is not RequestType.GENERATION_ONLY:
            decode = None if hands_off(self._request) else now - first
            return LegReport(
                prefill=first - self._began,
                decode=decode,
                decode_tokens=self._tokens,
                cached_tokens=self._cached,
            )
        # The cache came before the first token: what it took is known to the hub.
        return LegReport(
            generation_queue=first - self._began,
            decode=now - first,
            decode_tokens=self._tokens,
            cached_tokens=0,
        )

    def _handed_off(self, output: Any, number: int) -> list[SchedulerEvent]:
        self._offered |= bool(output.kv_transfer_params)
        for answer in output.outputs:
            if answer.finish_reason is None:
                continue
            self._check(answer)
            chunk = self._chunk(answer, number)
            # A context leg's "length" is its one token: the answer goes on elsewhere.
            going_on = answer.finish_reason == "length"
            self._sampled[chunk.sample] = replace(chunk, reason=None) if going_on else chunk
        if len(self._sampled) < self._open:
            return []
        first, key = tuple(chunk for _, chunk in sorted(self._sampled.items())), self._request.key
        if all(chunk.reason is not None for chunk in first):
            return [*(RequestTokens(key, chunk) for chunk in first), RequestFinished(key, None, self.report())]
        if not self._offered:
            raise TransferFailed(key, "this instance", "its blocks could not be offered; see its log")
        self.handed_off = True
        return [ContextDone(key, first, self.report())]

    def _went_on(self, output: Any, number: int) -> list[SchedulerEvent]:
        events: list[SchedulerEvent] = []
        for answer in output.outputs:
            self._check(answer)
            if answer.token_ids or answer.finish_reason is not None:
                events.append(RequestTokens(self._request.key, self._chunk(answer, number)))
            self._open -= answer.finish_reason is not None
        if self._open <= 0:
            events.append(RequestFinished(self._request.key, None, self.report()))
        return events

    def _check(self, answer: Any) -> None:
        if answer.finish_reason == "abort":
            raise RequestCancelled
        if answer.finish_reason is not None and answer.finish_reason not in _REASONS:
            raise self._problem(str(answer.finish_reason))

    def _problem(self, reason: str) -> IsthmusError:
        phase, context = self._request.context_phase, self._request.context
        holder = context if phase is None else phase.holder
        if holder is not None and not self._tokens:
            return TransferFailed(self._request.key, holder.instance_id, "the cache did not come; see the log")
        return InternalError(f"vLLM ended request {self._request.key} with {reason}")

    def _chunk(self, answer: Any, number: int) -> Tokens:
        ids = tuple(int(token) for token in answer.token_ids)
        self._tokens += len(ids)
        logprobs = () if answer.logprobs is None else tuple(_logprobs(ids, answer.logprobs, self._wanted))
        return Tokens(ids, number, logprobs, _REASONS.get(str(answer.finish_reason)))

    @property
    def _wanted(self) -> int:
        return self._request.sampling.logprobs or 0


def _logprobs(ids: tuple[int, ...], positions: Iterable[Any], wanted: int) -> Iterable[TokenLogprobs]:
    """At each position vLLM gives the chosen token's and the best ones', by token id."""
    for token, position in zip(ids, positions, strict=True):
        at = cast("Mapping[int, Any]", position)
        best = sorted(at.items(), key=lambda item: item[1].rank)[:wanted]
        yield TokenLogprobs(float(at[token].logprob), tuple((int(one), float(about.logprob)) for one, about in best))
