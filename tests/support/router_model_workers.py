"""Workers with a model in one line of arithmetic, which die when a test says so: for what happens to an answer then."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.v1.common_pb2 import TokenIds
from isthmus.v1.generation_pb2 import ContextPhaseParams, RequestReport, TokenChunk

from isthmus_core import token_ids
from isthmus_core.errors import IsthmusError
from isthmus_core.keys import RequestKey
from isthmus_core.tracing import TraceContext
from isthmus_router.ports import (
    ConnectionLost,
    ContextReady,
    Finished,
    FinishReason,
    InstanceRef,
    Leg,
    LegEvent,
    LegKind,
    TokenLogprobs,
    Tokens,
)

FIRST, COUNT = 97, 26


def _next(leg: Leg, sample: int, prompt: Sequence[int], output: Sequence[int]) -> int:
    """A letter that depends on all that a real model's choice depends on."""
    sampling = leg.sampling
    index = sampling.first_sample + sample
    said = (*prompt, *output)
    seen = sorted(output) if sampling.presence_penalty or sampling.frequency_penalty else []
    drawn = (sampling.seed, index, len(said)) if sampling.temperature else ()
    banned = set(sampling.stop_token_ids) if len(output) < sampling.min_tokens else set[int]()
    for salt in range(100):
        token = FIRST + zlib.crc32(repr((said, seen, drawn, salt)).encode()) % COUNT
        if token not in banned:
            return token
    raise AssertionError("every letter is banned")


def _answer(leg: Leg, sample: int, first: Sequence[int]) -> Iterator[Tokens]:
    """Chunks of one answer of a leg, one token each, behind those of the context leg."""
    prompt = token_ids.unpack(leg.prompt)
    resumed = leg.sampling.resumed
    begin, said = prompt[: len(prompt) - resumed], [*prompt[len(prompt) - resumed :], *first]
    made = len(first)
    while True:
        token = _next(leg, sample, begin, said)
        said.append(token)
        made += 1
        reason = FinishReason.STOP if token in leg.sampling.stop_token_ids else None
        reason = FinishReason.LENGTH if reason is None and made == leg.sampling.max_tokens else reason
        rated = () if leg.sampling.logprobs is None else (TokenLogprobs(-token / 100.0, ((token, -token / 100.0),)),)
        yield Tokens((token,), sample, rated, reason)
        if reason is not None:
            return


def _in_turns(answers: Sequence[Iterator[Tokens]]) -> Iterator[Tokens]:
    waiting = list(answers)
    while waiting:
        for one in list(waiting):
            chunk = next(one, None)
            if chunk is None:
                waiting.remove(one)
            else:
                yield chunk


def _chunk(tokens: Tokens) -> TokenChunk:
    reason = 0 if tokens.reason is None else tokens.reason.value
    return TokenChunk(
        sample=tokens.sample,
        tokens=TokenIds(le_uint32=token_ids.pack(tokens.ids)),
        finish_reason=reason,  # type: ignore[arg-type]
    )


@dataclass
class ModelWorkers:
    """Implements `ports.Workers`. `deaths`: for the calls in their order, after how many events the connection breaks
    (None: it does not); `error`: what is raised then in place of ConnectionLost. `legs`: all calls."""

    deaths: list[int | None] = field(default_factory=list[int | None])
    error: IsthmusError | None = None
    legs: list[tuple[str, Leg]] = field(default_factory=list[tuple[str, Leg]])
    aborted: list[RequestKey] = field(default_factory=list[RequestKey])
    running: int = 0

    async def generate(
        self, instance: InstanceRef, leg: Leg, *, timeout_s: float, trace: TraceContext | None
    ) -> AsyncGenerator[LegEvent, None]:
        number = len(self.legs)
        self.legs.append((instance.instance_id, leg))
        left = self.deaths[number] if number < len(self.deaths) else None
        self.running += 1
        try:
            for event in self._events(leg):
                if left == 0:
                    raise self.error or ConnectionLost("gone")
                left = None if left is None else left - 1
                yield event
        finally:
            self.running -= 1

    def _events(self, leg: Leg) -> Iterator[LegEvent]:
        n = leg.sampling.n
        if leg.kind is LegKind.CONTEXT:
            first = tuple(next(_answer(leg, sample, ())) for sample in range(n))
            if all(chunk.reason is not None for chunk in first):
                yield from first
                yield Finished(RequestReport())
            else:
                params = ContextPhaseParams(first_tokens=[_chunk(one) for one in first])
                yield ContextReady(first, params, RequestReport())
            return
        firsts: list[tuple[int, ...]] = [()] * n
        if leg.context_phase is not None:
            rows = leg.context_phase.first_tokens
            firsts = [token_ids.unpack(row.tokens.le_uint32) for row in rows]
            open_ = [row.sample for row in rows if not row.finish_reason]
        else:
            open_ = list(range(n))
        yield from _in_turns([_answer(leg, sample, firsts[sample]) for sample in open_])
        yield Finished(RequestReport(decode_tokens=1))

    async def abort(self, instance: InstanceRef, key: RequestKey) -> None:
        self.aborted.append(key)
