"""Rows and draws for tests of sampling, and the functions under test on plain arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw, Drawn
from isthmus_worker.sampling.sampler import draw_tokens

_BLOCKS: NDArray[np.int32] = np.zeros(1, np.int32)


def want(sampling: Sampling, sample: int = 0, prompt: Sequence[int] = (0,), output: Sequence[int] = ()) -> Draw:
    """One draw."""
    return Draw(sampling, sample, np.array(prompt, np.int64), np.array(output, np.int64))


def row_at(position: int, *draws: Draw) -> BatchRow:
    """A row whose draws are for absolute `position` (at least 1)."""
    return BatchRow(np.zeros(1, np.int64), position - 1, (_BLOCKS,), draws)


def drawn(logits: NDArray[np.float32] | torch.Tensor, rows: Sequence[BatchRow]) -> list[tuple[Drawn, ...]]:
    """`draw_tokens`; it must leave the logits as they are."""
    given = torch.as_tensor(logits)
    before = given.clone()
    found = draw_tokens(given, rows)
    assert torch.equal(given.nan_to_num(), before.nan_to_num())
    return found


def tokens(logits: NDArray[np.float32] | torch.Tensor, rows: Sequence[BatchRow]) -> list[list[int]]:
    """Tokens of `drawn`."""
    return [[one.token for one in row] for row in drawn(logits, rows)]


def one_token(logits: NDArray[np.float32] | torch.Tensor, draw: Draw, position: int = 1) -> int:
    """A single draw from float32[vocab]."""
    return tokens(torch.as_tensor(logits)[None], [row_at(position, draw)])[0][0]
