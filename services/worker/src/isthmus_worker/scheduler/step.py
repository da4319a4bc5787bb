"""One step of the model, as it is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.runner import BatchRow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_worker.cache.base import Copy
    from isthmus_worker.runner import ModelRunner
    from isthmus_worker.scheduler.answer import Answer


@dataclass(slots=True)
class StepPlan:
    """Row i computes the next tokens of answer i. `left`: tokens that the step may still take.

    `copies`: blocks to be copied before anything is computed and before anything that was said during the planning is
    sent: the source may have another owner from this step on.
    """

    number: int
    left: int
    copies: list[Copy]
    rows: list[BatchRow] = field(default_factory=list[BatchRow])
    answers: list[Answer] = field(default_factory=list["Answer"])

    def share(self, answer: Answer) -> int:
        """As many of the answer's missing tokens, and of its drafts behind them, as the step still takes."""
        if answer.missing > self.left:
            return self.left
        answer.drafts = answer.drafts[: self.left - answer.missing]
        return answer.missing + len(answer.drafts)

    def add(self, answer: Answer, blocks: tuple[NDArray[np.int32], ...]) -> None:
        """The answer's share. Drafts that are not tried now are forgotten."""
        count = self.share(answer)
        whole = count >= answer.missing
        if whole:
            answer.propose()
        draws = answer.request.draws(answer) if whole else ()
        self.rows.append(BatchRow(answer.chunk(count), answer.computed, blocks, draws))
        answer.stepped = (self.number, len(self.answers))
        self.answers.append(answer)
        self.left -= count

    def make_copies(self, runner: ModelRunner, dp_rank: int = 0) -> None:
        """Before anything is computed, in the cache of the attention-dp group."""
        for src, dst, number in self.copied_blocks():
            runner.copy_blocks(src, dst, number, dp_rank)

    def copied_blocks(self) -> list[tuple[NDArray[np.int32], NDArray[np.int32], int]]:
        """`copies` as the runner takes them: (from, to, block list)."""
        numbers = sorted({copy.number for copy in self.copies})
        by_list = [(number, [copy for copy in self.copies if copy.number == number]) for number in numbers]
        return [
            (np.array([copy.src for copy in some], np.int32), np.array([copy.dst for copy in some], np.int32), number)
            for number, some in by_list
        ]
