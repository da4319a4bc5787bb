"""What changes logits before anything is chosen, greedy answers included: bias, penalties, tokens that are not allowed.

The work is proportional to the tokens that are named (biased, said before), not to the vocabulary: logits are addressed
as `row * vocab + token` in one flat array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from isthmus_worker.runner import Draw


def adjusts(draw: Draw) -> bool:
    """True when `adjust_` changes the logits of this draw."""
    sampling = draw.sampling
    return bool(
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1
        or sampling.logit_bias
        or (sampling.stop_token_ids and len(draw.output) < sampling.min_tokens)
    )


def adjust_(logits: Tensor, draws: Sequence[Draw]) -> None:
    """In place, float32[draws, vocab]: bias, repetition, frequency, presence, minimum length, in this order."""
    flat, vocab = logits.view(-1), logits.shape[1]
    _add_bias(flat, vocab, draws)
    _repetition(flat, vocab, draws)
    _frequency_and_presence(flat, vocab, draws)
    _minimum_length(flat, vocab, draws)


def _add_bias(flat: Tensor, vocab: int, draws: Sequence[Draw]) -> None:
    places = [row * vocab + token for row, draw in enumerate(draws) for token, _ in draw.sampling.logit_bias]
    if places:
        values = [bias for draw in draws for _, bias in draw.sampling.logit_bias]
        where = torch.tensor(places, device=flat.device)
        flat[where] += torch.tensor(values, dtype=flat.dtype, device=flat.device)


def _repetition(flat: Tensor, vocab: int, draws: Sequence[Draw]) -> None:
    """Makes tokens of prompt and output less likely: positive logits are divided, negative ones multiplied."""
    penalties = np.array([draw.sampling.repetition_penalty for draw in draws], np.float32)
    rows = np.flatnonzero(penalties != 1).tolist()
    if not rows:
        return
    places = np.unique(
        np.concatenate([row * vocab + part for row in rows for part in (draws[row].prompt, draws[row].output)])
    )
    where, penalty = _on(flat, places), _on(flat, penalties[places // vocab])
    before = flat[where]
    after = torch.where(before > 0, before / penalty, before * penalty)
    # A tiny penalty must not make a logit infinite: there would be no distribution.
    flat[where] = after.clamp_(max=torch.finfo(flat.dtype).max)


def _frequency_and_presence(flat: Tensor, vocab: int, draws: Sequence[Draw]) -> None:
    """Subtracts from the tokens of the output: once, and once for each time."""
    presence = np.array([draw.sampling.presence_penalty for draw in draws])
    frequency = np.array([draw.sampling.frequency_penalty for draw in draws])
    rows = np.flatnonzero((presence != 0) | (frequency != 0)).tolist()
    if not rows:
        return
    places, counts = np.unique(np.concatenate([row * vocab + draws[row].output for row in rows]), return_counts=True)
    at = places // vocab
    flat[_on(flat, places)] -= _on(flat, (counts * frequency[at] + presence[at]).astype(np.float32))


def _minimum_length(flat: Tensor, vocab: int, draws: Sequence[Draw]) -> None:
    places = [
        row * vocab + token
        for row, draw in enumerate(draws)
        if len(draw.output) < draw.sampling.min_tokens
        for token in draw.sampling.stop_token_ids
    ]
    if places:
        flat[torch.tensor(places, device=flat.device)] = float("-inf")


def _on(flat: Tensor, values: NDArray[np.int64] | NDArray[np.float32]) -> Tensor:
    return torch.as_tensor(values, device=flat.device)
