"""The model behind the scheduler, inside the engine process: one batch in, the drawn tokens out.

`isthmus_worker.torch_engine.TorchRunner` and `isthmus_worker.mock_engine.MockRunner` implement it; the scheduler, the
block manager and the loop around them are shared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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

    `block_bytes`: of one block of each block list of the cache, on this rank. `windows`: what each layer group of the
    model sees, in the order of `isthmus_worker.cache.layout.LayerGroups`. `kernels`: what computes attention, for logs.
    """

    name: str
    max_model_len: int
    vocab_size: int
    block_bytes: tuple[int, ...]
    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    windows: tuple[int | None, ...] = (None,)
    kernels: str = ""

    @property
    def bytes_per_block(self) -> int:
        """Of one block of every list: all layers."""
        return sum(self.block_bytes)


@dataclass(frozen=True, slots=True)
class Draw:
    """One token wanted from a row's logits: answer `sample` of a request.

    `prompt` and `output` int64: what the penalties look at; views that the caller only ever appends to. `back`: the
    token wanted is the one behind the row's token number `back` from its end (drafts are verified this way); the draws
    of a row come in the order of their positions.
    """

    sampling: Sampling
    sample: int
    prompt: NDArray[np.int64]
    output: NDArray[np.int64]
    back: int = 0


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One sequence in one step: compute `token_ids` at positions [start, start + len), store their K and V.

    `blocks` lists the sequence's blocks from token 0, int32, once for each block list of the cache: one that all layers
    share, or one for each layer group. Each covers at least start + len tokens; -1 where a window has left a block
    behind. The step reads the KV of positions [0, start) from them, as far as its layers see it. `draws`: tokens wanted
    at position start + len, or before; none for a prefill chunk that is not the last of its prompt, several for the
    prompt of a request with n answers.
    `dp_rank`: the attention-dp group that computes it.
    """

    token_ids: NDArray[np.int64]
    start: int
    blocks: tuple[NDArray[np.int32], ...]
    draws: tuple[Draw, ...] = ()
    dp_rank: int = 0

    @property
    def backs(self) -> tuple[int, ...]:
        """Of its draws, each once, in order: how many tokens before its end logits are wanted."""
        return tuple(dict.fromkeys(draw.back for draw in self.draws))


def draw_points(row: BatchRow) -> tuple[BatchRow, ...]:
    """The row, cut after each token behind which tokens are wanted: one row for each such place, with its draws."""
    backs = row.backs
    if backs == (0,):
        return (row,)
    return tuple(
        replace(
            row,
            token_ids=row.token_ids[: len(row.token_ids) - back],
            draws=tuple(draw for draw in row.draws if draw.back == back),
        )
        for back in backs
    )


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
    - `allocate_cache(*num_blocks)`, one number for each block list, is called exactly once and returns the page table
      of the memory it made. The memory never moves and outlives the transfer agent. Blocks are zeroed.
    - `execute(rows)` computes one step. Returns for each row, in order, one `Drawn` per draw. Every K/V write of the
      step is complete (on the host's clock) when it returns. Raises `NonFiniteLogits` when the model has no answer for
      some rows; the other rows are good.
    - `copy_blocks(src, dst, number, dp_rank)` copies whole blocks of one block list of one attention-dp group, int32[N]
      each, before the next step.
    - `block_lists(rank)`: the block list of each layer group in the page table of a rank of this instance.
    - `warm_up()` runs once after `allocate_cache` and leaves the cache zeroed.
    """

    def describe(self) -> ModelDescription: ...

    def allocate_cache(self, *num_blocks: int) -> PageTable: ...

    def block_lists(self, rank: int = 0) -> tuple[int, ...]: ...

    def warm_up(self) -> None: ...

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]: ...

    def copy_blocks(
        self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int = 0, dp_rank: int = 0
    ) -> None: ...
