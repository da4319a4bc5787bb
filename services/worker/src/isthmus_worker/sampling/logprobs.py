"""Log probabilities under the model's own distribution: before bias, penalties, temperature and filters."""

# Tensor.tolist is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from isthmus_worker.engine import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# As low as OpenAI's API goes. Minus infinity has no place in JSON.
_LOWEST = -9999.0


def token_logprobs(logits: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """For each row of float32[N, vocab]: of its token, and of its `counts` best ones, best first."""
    logs = logits.log_softmax(-1).clamp_(min=_LOWEST, max=0.0)
    chosen = logs.gather(1, torch.tensor(tokens, device=logs.device)[:, None])
    ids = _best(logits, min(max(counts), logits.shape[1]))
    # One transfer for all of it: float64 holds ids exactly.
    table: list[list[float]] = torch.cat([chosen.double(), logs.gather(1, ids).double(), ids.double()], 1).tolist()
    return [_of_row(row, count) for row, count in zip(table, counts, strict=True)]


def _of_row(row: list[float], count: int) -> TokenLogprobs:
    """`row` is (chosen, best ones, ids of the best ones)."""
    width = len(row) // 2
    logprobs, ids = row[1 : 1 + width], row[1 + width :]
    best = zip(ids[:count], logprobs[:count], strict=True)
    return TokenLogprobs(row[0], tuple((int(token), logprob) for token, logprob in best))


def _best(logits: Tensor, count: int) -> Tensor:
    """Ids of the best tokens, int64[N, count]; of equals the lower id is first, as for the greedy choice."""
    # The bits of a float are an integer of the same order once those of negative ones are turned round. The sum makes
    # one zero of the two.
    bits = (logits + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    order += torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    return logits.shape[1] - 1 - (order.topk(count).values & 0xFFFFFFFF)
