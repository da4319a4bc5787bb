"""Log probabilities of a split run beside those of the unsplit one, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from parity_fleet import Fleet, Instance, Shape, request
from parity_oracle import cases
from worker_process import BOTH, CONTEXT, GENERATION

if TYPE_CHECKING:
    from parity_oracle import Case

VOCAB = 8192


@dataclass(frozen=True, slots=True)
class Compared:
    """`identical`: every token and every float. `largest`: error of a log probability over the `steps` in which both
    have read the same text; `steps_in_all` there were."""

    identical: bool
    largest: float
    steps: int
    steps_in_all: int

    def __str__(self) -> str:
        same = ", every float is the same" if self.identical else ""
        return f"{self.steps} of {self.steps_in_all} steps with equal text, largest error {self.largest:.3g}{same}"


async def compare_bfloat16(fleet: Fleet, context: Shape, generation: Shape) -> Compared:
    """Greedy cases over the pair, and over one instance that is cut like `generation`. Shapes say model.dtype."""
    wanted = [case for case in cases(VOCAB) if not case.seeded]
    pair = await fleet.pair(context, generation)
    alone = await fleet.alone(generation)
    errors: list[float] = []
    identical = True
    for case in wanted:
        whole = await _unsplit(alone, case, fleet.number())
        parted = await _split(pair, case, fleet.number())
        assert len(whole) == len(parted) == case.new_tokens
        identical &= parted == whole
        for (token, one), (other_token, other) in zip(whole, parted, strict=True):
            if token != other_token:
                break  # from here on the two read different texts
            errors.append(abs(one - other))
    for one in (*pair, alone):
        await one.process.idle()
    return Compared(identical, max(errors), len(errors), sum(case.new_tokens for case in wanted))


async def _logprobs(instance: Instance, made: Any) -> tuple[list[tuple[int, float]], Any]:
    """(token, log probability) of every position, and the last answer."""
    made.sampling.logprobs = 1
    answers = [one async for one in instance.process.stub.Generate(made, timeout=60)]
    chunks = [one.tokens for one in answers if one.HasField("tokens")]
    return _pairs(chunks), answers[-1]


def _pairs(chunks: Any) -> list[tuple[int, float]]:
    return [
        (int.from_bytes(one.tokens.le_uint32[4 * at : 4 * at + 4], "little"), entry.logprob)
        for one in chunks
        for at, entry in enumerate(one.logprobs)
    ]


async def _unsplit(instance: Instance, case: Case, number: int) -> list[tuple[int, float]]:
    return (await _logprobs(instance, request(case, BOTH, number)))[0]


async def _split(pair: tuple[Instance, Instance], case: Case, number: int) -> list[tuple[int, float]]:
    _, last = await _logprobs(pair[0], request(case, CONTEXT, number))
    params = last.context_ready.params
    rest, _ = await _logprobs(pair[1], request(case, GENERATION, number, params))
    return _pairs(params.first_tokens) + rest
