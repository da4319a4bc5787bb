"""One step of the model, as it is put together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus_worker.runner import BatchRow

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from isthmus_worker.scheduler.request import Request


@dataclass(slots=True)
class StepPlan:
    """Row i computes the next tokens of request i. `left`: tokens that the step may still take."""

    left: int
    rows: list[BatchRow] = field(default_factory=list[BatchRow])
    requests: list[Request] = field(default_factory=list["Request"])

    def add(self, request: Request, blocks: NDArray[np.int32]) -> None:
        """As many of the request's missing tokens as the step still takes."""
        count = min(request.missing, self.left)
        self.rows.append(
            BatchRow(
                token_ids=request.chunk(count),
                start=request.computed,
                blocks=blocks,
                want_token=count == request.missing,
            )
        )
        self.requests.append(request)
        self.left -= count
