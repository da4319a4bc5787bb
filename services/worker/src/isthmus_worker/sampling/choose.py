"""From logits to a token: temperature, min-p, top-k, top-p, and the inverse of what remains at a given number.

With weights exp((logit - best) / temperature), the best token weighs 1 and

    min-p   keeps weights >= min_p
    top-k   keeps logits >= the k-th best one
    top-p   keeps, best first, until the weights kept reach top_p of all weights that the other two kept

Each keeps all tokens above some logit, so tokens of equal logit stay or go together and no order among them matters.
Cumulative weights run in the order of token ids, in float64: a row gets the same token whatever else is in the batch
and whichever of the ways below computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_worker.sampling.random import uniforms

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from isthmus_worker.runner import Draw

# Best tokens looked at for top-k and top-p. Mostly the first is enough, and sorting all costs 30 times as much.
_CANDIDATES = (256, 4096)


@dataclass(frozen=True, slots=True)
class _Settings:
    """Of N draws, on the device of the logits: float64[N], `top_k` int64[N] (0 = off), `number` in (0, 1).

    `min_p` is None where none has it: a pass over all weights less.
    """

    temperature: Tensor
    min_p: Tensor | None
    top_p: Tensor
    top_k: Tensor
    number: Tensor

    def take(self, rows: Tensor) -> _Settings:
        """Of some of the draws, int64[M] or bool[N]."""
        min_p = None if self.min_p is None else self.min_p[rows]
        return _Settings(self.temperature[rows], min_p, self.top_p[rows], self.top_k[rows], self.number[rows])


def choose(logits: Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> Tensor:
    """A token for each row of float32[N, vocab], int64[N]; -1 where the best logit is not finite."""
    best, tokens = logits.max(-1)
    vocab = logits.shape[1]
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    limited = [row for row in drawn if draws[row].sampling.top_p < 1 or 0 < draws[row].sampling.top_k < vocab]
    for way, rows in ((_draw, sorted(set(drawn).difference(limited))), (_draw_limited, limited)):
        if rows:
            settings = _settings([draws[row] for row in rows], [positions[row] for row in rows], vocab, logits.device)
            at = torch.tensor(rows, device=logits.device)
            everything = len(rows) == len(logits)
            found = way(logits if everything else logits[at], best[at][:, None], settings)
            tokens[at] = torch.where(found < 0, tokens[at], found)
    return torch.where(best.isfinite(), tokens, -1)


def _settings(draws: Sequence[Draw], positions: Sequence[int], vocab: int, device: torch.device) -> _Settings:
    table = np.empty((5, len(draws)))
    for column, draw in enumerate(draws):
        sampling = draw.sampling
        top_k = sampling.top_k if sampling.top_k < vocab else 0
        table[:4, column] = sampling.temperature, sampling.min_p, sampling.top_p, top_k
    table[4] = uniforms(
        (draw.sampling.seed, draw.sample, position) for draw, position in zip(draws, positions, strict=True)
    )
    temperature, min_p, top_p, top_k, number = torch.as_tensor(table, device=device)
    return _Settings(temperature, min_p if table[1].any() else None, top_p, top_k.long(), number)


def _draw(logits: Tensor, best: Tensor, settings: _Settings) -> Tensor:
    """Temperature and min-p only: all tokens take part."""
    return _pick(_weights(logits, best, settings), settings.number)


def _draw_limited(logits: Tensor, best: Tensor, settings: _Settings) -> Tensor:
    """With top-k or top-p: among the best tokens, as many as it takes."""
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    total = _total(logits, best, settings)
    pending = torch.arange(len(logits), device=logits.device)
    for count in (*_CANDIDATES, logits.shape[1]):
        some = min(count, logits.shape[1])
        values, ids = (logits if len(pending) == len(logits) else logits[pending]).topk(some)
        weights, complete = _limit(values, total[pending], settings.take(pending), some == logits.shape[1])
        ids, order = ids.sort()
        index = _pick(weights.gather(1, order), settings.number[pending])
        found = torch.where(index < 0, index, ids.gather(1, index[:, None].clamp(min=0))[:, 0])
        tokens[pending[complete]] = found[complete]
        pending = pending[~complete]
        if not len(pending):
            break
    return tokens


def _total(logits: Tensor, best: Tensor, settings: _Settings) -> Tensor:
    """What top-p takes its share of where there is no top-k: all weights that min-p keeps. float64[N]; else 0."""
    total = torch.zeros_like(settings.number)
    rows = (settings.top_k == 0).nonzero()[:, 0]
    if len(rows):
        some = logits if len(rows) == len(logits) else logits[rows]
        # A sum would depend on the number of rows in its last bit: it is cut into parts among threads.
        total[rows] = _weights(some, best[rows], settings.take(rows)).cumsum(-1)[:, -1]
    return total


def _limit(values: Tensor, total: Tensor, settings: _Settings, everything: bool) -> tuple[Tensor, Tensor]:
    """Weights of the best logits [N, C], descending, 0 for those that go; and bool[N]: no further token would stay."""
    weights = _weights(values, values[:, :1], settings)
    top_k = torch.where(settings.top_k > 0, settings.top_k, values.shape[1]).clamp_(max=values.shape[1])
    in_k = values >= values.gather(1, top_k[:, None] - 1)
    weights.mul_(in_k)
    reached = weights.cumsum(-1)
    whole = torch.where(settings.top_k > 0, reached[:, -1], total)
    before = torch.zeros_like(reached)
    before[:, 1:] = reached[:, :-1]
    kept = (before < (settings.top_p * whole)[:, None]) & (weights > 0)
    last = values.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    kept = (values >= last) & (weights > 0)
    if everything:
        complete = torch.ones_like(kept[:, 0])
    else:
        complete = ~kept[:, -1] & ((settings.top_k == 0) | (weights[:, -1] == 0))
    return weights.mul_(kept), complete


def _weights(logits: Tensor, best: Tensor, settings: _Settings) -> Tensor:
    """float64[N, C], 0 for what min-p takes away."""
    weights = logits.double().sub_(best).div_(settings.temperature[:, None]).exp_()
    return weights if settings.min_p is None else weights.mul_(weights >= settings.min_p[:, None])


def _pick(weights: Tensor, number: Tensor) -> Tensor:
    """The first index [N] at which the weights so far exceed `number` times all of them; -1 where there is none.

    A parallel sum need not grow monotonously in its last bit: where that names an index without weight, it is none.
    """
    reached = weights.cumsum(-1)
    target = number[:, None] * reached[:, -1:]
    index = torch.searchsorted(reached, target, right=True).clamp_(max=weights.shape[1] - 1)
    return torch.where(weights.gather(1, index) > 0, index, -1)[:, 0]
