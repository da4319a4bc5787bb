"""What vLLM says about one leg as the engine's own events. Takes vLLM's objects as they are, imports none.

context       first token ─▶ ContextDone (its blocks are offered), or the answer's end
generation    tokens, without the first one ─▶ end
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from isthmus_core.errors import InternalError, RequestCancelled, TransferFailed
from isthmus_worker.engine import EngineRequest, FinishReason, LegReport, TokenLogprobs, Tokens
from isthmus_worker.scheduler.events import ContextDone, RequestFinished, RequestTokens
from isthmus_worker.vllm_engine.sampling import hands_off

if TYPE_CHECKING:
    from isthmus_core.errors import IsthmusError
    from isthmus_worker.scheduler.events import SchedulerEvent

_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class LegOutput:
    """One leg. `clock` in seconds, monotonic."""

    def __init__(self, request: EngineRequest, clock: Callable[[], float] = time.monotonic) -> None:
        self._request, self._clock = request, clock
        self._began = clock()
        self._first: float | None = None
        self._tokens = 0
        self._cached = 0
        self._open = request.sampling.n

    def events(self, output: Any) -> list[SchedulerEvent]:
        """A RequestOutput with the tokens that are new."""
        if self._first is None:
            self._first = self._clock()
            self._cached = int(output.num_cached_tokens or 0)
        if hands_off(self._request):
            return self._handed_off(output)
        return self._went_on(output)

    def failed(self, error: IsthmusError) -> RequestFinished:
        """The leg's end by an error."""
        return RequestFinished(self._request.key, error, self.report())

    def report(self) -> LegReport:
        """Where the time went, as far as it can be seen from here."""
        now = self._clock()
        first = now if self._first is None else self._first
        if self._request.context_phase is None:
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

    def _handed_off(self, output: Any) -> list[SchedulerEvent]:
        (answer,) = output.outputs
        if answer.finish_reason is None:
            return []
        first = self._chunk(answer)
        if answer.finish_reason == "length" and output.kv_transfer_params:
            without_end = Tokens(first.ids, logprobs=first.logprobs)
            return [ContextDone(self._request.key, (without_end,), self.report())]
        if answer.finish_reason == "length":
            error = TransferFailed(self._request.key, "this instance", "its blocks could not be offered; see its log")
            return [self.failed(error)]
        return self._end_of(answer, first)

    def _went_on(self, output: Any) -> list[SchedulerEvent]:
        events: list[SchedulerEvent] = []
        for answer in output.outputs:
            if answer.finish_reason is not None:
                self._open -= 1
                events += self._end_of(answer, self._chunk(answer))
            elif answer.token_ids:
                events.append(RequestTokens(self._request.key, self._chunk(answer)))
        return events

    def _end_of(self, answer: Any, chunk: Tokens) -> list[SchedulerEvent]:
        if answer.finish_reason == "abort":
            return [self.failed(RequestCancelled())]
        if answer.finish_reason not in _REASONS:
            return [self.failed(self._problem(str(answer.finish_reason)))]
        events: list[SchedulerEvent] = [RequestTokens(self._request.key, chunk)]
        if self._open <= 0 or hands_off(self._request):
            events.append(RequestFinished(self._request.key, None, self.report()))
        return events

    def _problem(self, reason: str) -> IsthmusError:
        phase = self._request.context_phase
        if phase is not None and not self._tokens:
            return TransferFailed(self._request.key, phase.holder.instance_id, "the cache did not come; see the log")
        return InternalError(f"vLLM ended request {self._request.key} with {reason}")

    def _chunk(self, answer: Any) -> Tokens:
        ids = tuple(int(token) for token in answer.token_ids)
        self._tokens += len(ids)
        logprobs = () if answer.logprobs is None else tuple(_logprobs(ids, answer.logprobs, self._wanted))
        return Tokens(ids, int(answer.index), logprobs, _REASONS.get(str(answer.finish_reason)))

    @property
    def _wanted(self) -> int:
        return self._request.sampling.logprobs or 0


def _logprobs(ids: tuple[int, ...], positions: Iterable[Any], wanted: int) -> Iterable[TokenLogprobs]:
    """At each position vLLM gives the chosen token's and the best ones', by token id."""
    for token, position in zip(ids, positions, strict=True):
        at = cast("Mapping[int, Any]", position)
        best = sorted(at.items(), key=lambda item: item[1].rank)[:wanted]
        yield TokenLogprobs(float(at[token].logprob), tuple((int(one), float(about.logprob)) for one, about in best))
