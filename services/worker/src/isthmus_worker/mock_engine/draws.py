"""How the mock draws: its model's best character comes from the cache, the request's settings may turn it further.

The 95 printable characters form a ring. Greedy answers take the best character. With a temperature the character is
floor(u * 95) steps further, u being the token's random number: each is equally likely. A character is skipped for the
next one while its bias is -100, or while it is a stop token and the answer is shorter than min_tokens; when that skips
all of them the first one stays. Other settings change nothing. Under the mock's own distribution the character d steps
behind the best one has probability 2^-(d+1), the last one 2^-94, so that they add up to 1.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isthmus_worker.engine import TokenLogprobs
from isthmus_worker.mock_engine.hashing import CHARACTERS, FIRST_CHARACTER
from isthmus_worker.runner import Drawn
from isthmus_worker.sampling import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_worker.runner import BatchRow, Draw

_BANNED = -100.0
_LOG_HALF = math.log(0.5)


def draw_tokens(best: Sequence[int], rows: Sequence[BatchRow]) -> list[tuple[Drawn, ...]]:
    """The draws of each row, whose best character is `best`."""
    numbers = iter(
        uniforms(
            (draw.sampling.seed, draw.sample, row.start + len(row.token_ids))
            for row in rows
            for draw in row.draws
            if draw.sampling.temperature > 0
        ).tolist()
    )
    return [
        tuple(_choose(token, draw, next(numbers) if draw.sampling.temperature > 0 else 0.0) for draw in row.draws)
        for token, row in zip(best, rows, strict=True)
    ]


def _choose(best: int, draw: Draw, number: float) -> Drawn:
    first, sampling = _turn(best, int(number * CHARACTERS)), draw.sampling
    banned = {token for token, bias in sampling.logit_bias if bias <= _BANNED}
    if len(draw.output) < sampling.min_tokens:
        banned.update(sampling.stop_token_ids)
    token = next((one for one in _ring(first, CHARACTERS) if one not in banned), first) if banned else first
    if sampling.logprobs is None:
        return Drawn(token)
    top = tuple((one, _logprob(steps)) for steps, one in enumerate(_ring(best, sampling.logprobs)))
    return Drawn(token, TokenLogprobs(_logprob((token - best) % CHARACTERS), top))


def _ring(first: int, count: int) -> list[int]:
    return [_turn(first, steps) for steps in range(count)]


def _turn(character: int, steps: int) -> int:
    return FIRST_CHARACTER + (character - FIRST_CHARACTER + steps) % CHARACTERS


def _logprob(steps: int) -> float:
    return _LOG_HALF * (min(steps, CHARACTERS - 2) + 1)
