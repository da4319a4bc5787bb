"""One step of the model, as it is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.runner import BatchRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_worker.scheduler.answer import Answer


@dataclass(slots=True)
class StepPlan:
    """Row i computes the next tokens of answer i. `left`: tokens that the step may still take.

    `copies`: (from, to) blocks to be copied before anything is computed and before anything that was said during the
    planning is sent: the source may have another owner from this step on.
    """

    number: int
    left: int
    copies: list[tuple[int, int]]
    rows: list[BatchRow] = field(default_factory=list[BatchRow])
    answers: list[Answer] = field(default_factory=list["Answer"])

    def add(self, answer: Answer, blocks: NDArray[np.int32]) -> None:
        """As many of the answer's missing tokens as the step still takes."""
        count = min(answer.missing, self.left)
        draws = answer.request.draws(answer) if count == answer.missing else ()
        self.rows.append(BatchRow(answer.chunk(count), answer.computed, blocks, draws))
        answer.stepped = (self.number, len(self.answers))
        self.answers.append(answer)
        self.left -= count

    def copied_blocks(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """`copies` as the runner takes them."""
        src, dst = np.array(self.copies, np.int32).reshape(-1, 2).T
        return np.ascontiguousarray(src), np.ascontiguousarray(dst)
