"""The model behind the scheduler, inside the engine process: one batch in, the drawn tokens out.

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

    from isthmus_worker.engine import Sampling, TokenLogprobs
    from kvtransfer.page_table import PageTable


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What the engine must know before it can size its cache and judge requests.

    `kernels`: what computes attention, for logs.
    """

    name: str
    max_model_len: int
    vocab_size: int
    bytes_per_block: int
    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    kernels: str = ""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token wanted from a row's logits: answer `sample` of a request.

    `prompt` and `output` int64: what the penalties look at; views that the caller only ever appends to.
    """

    sampling: Sampling
    sample: int
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence in one step: compute `token_ids` at positions [start, start + len), store their K and V.

    `blocks` lists the sequence's blocks from token 0 (int32) and covers at least start + len tokens. The step reads the
    KV of positions [0, start) from them. `draws`: tokens wanted at position start + len; none for a prefill chunk that
    is not the last of its prompt, several for the prompt of a request with n answers.
    """

    token_ids: NDArray[np.int64]
    start: int
    blocks: NDArray[np.int32]
    draws: tuple[Draw, ...] = ()


@dataclass(frozen=True, slots=True)
class Drawn:
    """A chosen token. `logprobs` when the draw's sampling asks for them."""

    token: int
    logprobs: TokenLogprobs | None = None


class NonFiniteLogits(InternalError):
    """A step computed no usable logits for the rows (indexes into the batch) in `rows`: NaN or overflow.

    The step itself is complete: `drawn` is what `execute` would have returned, with () for the bad rows.
    """

    def __init__(self, rows: list[int], drawn: list[tuple[Drawn, ...]]) -> None:
        super().__init__(f"the model computed logits that are not finite for rows {rows} of the batch")
        self.rows = rows
        self.drawn = drawn


class ModelRunner(Protocol):
    """One rank's model and KV memory. Everything is called from the executor thread.

    Contract
    - `describe` is known after construction (weights are loaded and checked there: `IsthmusError` otherwise).
    - `allocate_cache(num_blocks)` is called exactly once and returns the page table of the memory it made. The memory
      never moves and outlives the transfer agent. Blocks are zeroed.
    - `execute(rows)` computes one step. Returns for each row, in order, one `Drawn` per draw. Every K/V write of the
      step is complete (on the host's clock) when it returns. Raises `NonFiniteLogits` when the model has no answer for
      some rows; the other rows are good.
    - `copy_blocks(src, dst)` copies whole blocks, int32[N] each, before the next step.
    - `warm_up()` runs once after `allocate_cache` and leaves the cache zeroed.
    """

    def describe(self) -> ModelDescription: ...

    def allocate_cache(self, num_blocks: int) -> PageTable: ...

    def warm_up(self) -> None: ...

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]: ...

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None: ...
