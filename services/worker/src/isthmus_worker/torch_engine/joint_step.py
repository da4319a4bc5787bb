"""One step as every rank sees it: the tokens of all attention-dp groups, and the positions of its own. Pure numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.torch_engine.batch import step_order, wanted_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_worker.runner import BatchRow
    from isthmus_worker.torch_engine.batch import StepPlan


@dataclass(frozen=True, slots=True)
class JointStep:
    """`tokens` int64[N]: of all groups, one group after the other. `own`: those of this rank's group, at `positions`.
    `last` int64[W]: index in `tokens` of each whose logits are wanted; `wanted` int64[W]: the row of the batch that it
    answers, rows counted over all groups in the order in which they were given."""

    tokens: NDArray[np.int64]
    own: slice
    positions: NDArray[np.int64]
    last: NDArray[np.int64]
    wanted: NDArray[np.int64]


def join(rows: Sequence[BatchRow], dp_size: int, dp_rank: int, plan: StepPlan | None) -> JointStep:
    """`plan`: of the rows of group `dp_rank`, None when there are none."""
    if dp_size == 1 and plan is not None:
        return JointStep(plan.tokens, slice(0, len(plan.tokens)), plan.positions, plan.last, plan.wanted)
    order: list[int] = []
    own = slice(0, 0)
    total = 0
    for group in range(dp_size):
        numbers = [index for index, row in enumerate(rows) if row.dp_rank == group]
        begin = total
        order += [numbers[at] for at in step_order([rows[index] for index in numbers])]
        total += sum(len(rows[index].token_ids) for index in numbers)
        if group == dp_rank:
            own = slice(begin, total)
    last, wanted = wanted_tokens(rows, order)
    return JointStep(
        np.concatenate([rows[index].token_ids for index in order]),
        own,
        np.zeros(0, np.int64) if plan is None else plan.positions,
        last,
        wanted,
    )
