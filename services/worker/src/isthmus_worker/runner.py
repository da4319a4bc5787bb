"""The model behind the scheduler, inside the engine process: one batch in, one token per finished row out.

`isthmus_worker.torch_engine.TorchRunner` and `isthmus_worker.mock_engine.MockRunner` implement it; the scheduler, the
block manager and the loop around them are shared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from isthmus_core.errors import InternalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtransfer.page_table import PageTable


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the engine must know before it can size its cache and judge requests."""

    name: str
    max_model_len: int
    vocab_size: int
    bytes_per_block: int
    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence in one step: compute `token_ids` at positions [start, start + len), store their K and V.

    `blocks` lists the sequence's blocks from token 0 (int32) and covers at least start + len tokens. The step reads the
    KV of positions [0, start) from them. `want_token` is False for a prefill chunk that is not the last of its prompt.
    """

    token_ids: NDArray[np.int64]
    start: int
    blocks: NDArray[np.int32]
    want_token: bool


class NonFiniteLogits(InternalError):
    """A step computed no usable logits for the rows (indexes into the batch) in `rows`: NaN or overflow.

    The step itself is complete: `tokens` is what `execute` would have returned, with -1 for the bad rows as well.
    """

    def __init__(self, rows: list[int], tokens: list[int]) -> None:
        super().__init__(f"the model computed logits that are not finite for rows {rows} of the batch")
        self.rows = rows
        self.tokens = tokens


class ModelRunner(Protocol):
    """One rank's model and KV memory. Everything is called from the executor thread.

    Contract
    - `describe` is known after construction (weights are loaded and checked there: `IsthmusError` otherwise).
    - `allocate_cache(num_blocks)` is called exactly once and returns the page table of the memory it made. The memory
      never moves and outlives the transfer agent. Blocks are zeroed.
    - `execute(rows)` computes one step. Returns one token id per row, in order, -1 where `want_token` is False. Every
      K/V write of the step is complete (on the host's clock) when it returns. Raises `NonFiniteLogits` when the model
      has no answer for some rows; the other rows are good.
    - `warm_up()` runs once after `allocate_cache` and leaves the cache zeroed.
    """

    def describe(self) -> ModelDescription: ...

    def allocate_cache(self, num_blocks: int) -> PageTable: ...

    def warm_up(self) -> None: ...

    def execute(self, rows: list[BatchRow]) -> list[int]: ...
