"""The draws of one step, from its logits. Vectorised over all draws; needs torch.

A greedy draw without extras takes the best token: one pass over the logits, as without this module. Every other draw
gets float32 logits of its own, which `adjust` changes and `choose` draws from; `logprobs` looks at the raw ones.
"""

# Tensor.tolist is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from isthmus_worker.runner import Drawn
from isthmus_worker.sampling.adjust import adjust_, adjusts
from isthmus_worker.sampling.choose import choose
from isthmus_worker.sampling.logprobs import token_logprobs

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from isthmus_worker.engine import TokenLogprobs
    from isthmus_worker.runner import BatchRow, Draw

# Logits that are worked on at a time, in float64. On the CPU 8 MiB, so that temporaries stay in memory that is mapped
# already; elsewhere 128 MiB, as every slice costs launches.
_CPU_SLICE = 1 << 20
_SLICE = 1 << 24


class _Wanted(NamedTuple):
    """A draw: `row` of the logits, `ordinal` among the draws of the row, and the absolute position of the token."""

    row: int
    ordinal: int
    draw: Draw
    position: int


def draw_tokens(logits: Tensor, rows: Sequence[BatchRow]) -> list[tuple[Drawn, ...]]:
    """The draws of each row, from logits [rows, vocab] of any floating dtype; () where no logit is an answer.

    That is where one is NaN, or the best one infinite: in the logits themselves or after bias and penalties.
    """
    best, greedy = logits.max(-1)
    # max propagates NaN, and an infinite best is an overflow.
    tokens: list[int] = torch.where(best.isfinite(), greedy, -1).tolist()
    drawn = [(Drawn(token),) * len(row.draws) if token >= 0 else () for token, row in zip(tokens, rows, strict=True)]
    special = [one for one in _wanted(rows) if tokens[one.row] >= 0 and _is_more_than_greedy(one.draw)]
    if not special:
        return drawn
    answers = [list(row) for row in drawn]
    for part in _slices(special, logits):
        for one, answer in zip(part, _special(logits, part), strict=True):
            answers[one.row][one.ordinal] = answer
    return [tuple(row) if all(one.token >= 0 for one in row) else () for row in answers]


def _special(logits: Tensor, wanted: Sequence[_Wanted]) -> list[Drawn]:
    """Draws with a temperature, changed logits or log probabilities. Token -1: no answer."""
    draws = [one.draw for one in wanted]
    # Indexing copies: the logits themselves stay what they are.
    raw = logits[torch.tensor([one.row for one in wanted], device=logits.device)].float()
    asked = [at for at, draw in enumerate(draws) if draw.sampling.logprobs is not None]
    own = raw.clone() if asked else raw
    adjust_(own, draws)
    tokens: list[int] = choose(own, draws, [one.position for one in wanted]).tolist()
    logprobs: dict[int, TokenLogprobs] = {}
    if asked:
        some = raw if len(asked) == len(raw) else raw[torch.tensor(asked, device=raw.device)]
        # A token that is none has no log probability: any other stands in, the row is dropped.
        named = [max(tokens[at], 0) for at in asked]
        counts = [draws[at].sampling.logprobs or 0 for at in asked]
        logprobs = dict(zip(asked, token_logprobs(some, named, counts), strict=True))
    return [Drawn(token, logprobs.get(at)) for at, token in enumerate(tokens)]


def _wanted(rows: Sequence[BatchRow]) -> Iterator[_Wanted]:
    for at, row in enumerate(rows):
        for index, draw in enumerate(row.draws):
            yield _Wanted(at, index, draw, row.start + len(row.token_ids))


def _is_more_than_greedy(draw: Draw) -> bool:
    return draw.sampling.temperature > 0 or draw.sampling.logprobs is not None or adjusts(draw)


def _slices(wanted: Sequence[_Wanted], logits: Tensor) -> Iterator[Sequence[_Wanted]]:
    step = max(1, (_CPU_SLICE if logits.device.type == "cpu" else _SLICE) // logits.shape[1])
    return (wanted[begin : begin + step] for begin in range(0, len(wanted), step))
