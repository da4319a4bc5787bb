"""The KV memory of one rank: one slot per block, and everything of a block inside its slot.

    slot | layer 0                              | layer 1 ...
         | K: head 0 [T][D] | head 1 [T][D] ... | V: head 0 [T][D] ... |            T = tokens_per_block, D = head_dim

A head of one layer in one block is one contiguous run of T * D elements; the kernels address runs, or rows of D
elements, by number. Numbers of layer l are those of layer 0 shifted by a constant, so each layer has a view of the
pool that begins at its first run, and one index serves all layers.

Layers that see the same positions form one layer group. All groups share the block table: a block holds the tokens of
every layer, and what a windowed group no longer needs stays in place.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_worker.torch_engine.batch import CacheShape
from isthmus_worker.torch_engine.model_config import ModelUnusable
from kvtransfer.page_table import HeadInterval, MemoryKind
from kvtransfer.storage import describe_attention_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.model_config import ModelConfig
    from kvtransfer.page_table import PageTable


class KvPool:
    """Zeroed memory for `num_blocks` blocks that never moves. Sizes in bytes unless a name says otherwise."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, tokens_per_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = CacheShape(num_blocks, config.layers, config.kv_heads, tokens_per_block)
        self.device = device
        self.num_blocks = num_blocks
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self._windows = config.windows
        self.block_bytes = block_bytes(config, tokens_per_block, dtype)
        self._memory = _aligned_zeros(num_blocks * self.block_bytes, device)
        # [num_blocks, layers, 2 (K, V), kv_heads, tokens_per_block, head_dim]
        self.blocks: Tensor = self._memory.view(dtype).view(
            num_blocks, config.layers, 2, config.kv_heads, tokens_per_block, config.head_dim
        )
        runs = self.blocks.view(-1, tokens_per_block * config.head_dim)
        rows = self.blocks.view(-1, config.head_dim)
        per_layer = 2 * config.kv_heads
        # Per layer: [runs, T * D] and [rows, D], both beginning at the layer's K of head 0 in block 0.
        self.runs: list[Tensor] = [runs[layer * per_layer :] for layer in range(config.layers)]
        self.rows: list[Tensor] = [rows[layer * per_layer * tokens_per_block :] for layer in range(config.layers)]
        # Per block: where the last write of a step ended, with zeros behind it; -1: nothing is known.
        self._written_to: NDArray[np.int64] = np.full(num_blocks, -1, np.int64)

    def zero(self) -> None:
        """Back to the state after construction."""
        self._memory.zero_()
        self._written_to[:] = -1

    def begin_step(self, plan: StepPlan) -> None:
        """Zeroes what an earlier owner left behind the last token of a row, when a row enters a block.

        A padded context reads the whole last block. Masked scores weigh nothing, but nothing times NaN is NaN.
        """
        entered = self._written_to[plan.tail_blocks] != plan.tail_begin
        for block, end in zip(plan.tail_blocks[entered].tolist(), plan.tail_end[entered].tolist(), strict=True):
            self.blocks[block, :, :, :, end:] = 0
        self._written_to[plan.write_blocks] = -1
        self._written_to[plan.tail_blocks] = plan.tail_end

    def copy(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Whole blocks, int32[N] each; none of `dst` is in `src`."""
        from_, to = (torch.as_tensor(ids, dtype=torch.int64, device=self.device) for ids in (src, dst))
        self.blocks[to] = self.blocks[from_]
        self._written_to[dst] = -1

    def page_table(self) -> PageTable:
        """The memory as the transfer library sees it. Checked."""
        cuda = self.device.type == "cuda"
        return describe_attention_pool(
            base_address=self._memory.data_ptr(),
            num_blocks=self.num_blocks,
            block_bytes=self.block_bytes,
            layers=range(self.shape.layers),
            kv_heads=HeadInterval(0, self.kv_heads),
            tokens_per_block=self.shape.tokens_per_block,
            windows=self._windows,
            memory_kind=MemoryKind.VRAM if cuda else MemoryKind.DRAM,
            device_id=self.device.index or 0,
        )


def block_bytes(config: ModelConfig, tokens_per_block: int, dtype: torch.dtype) -> int:
    """Bytes of one block: all layers, K and V."""
    return config.layers * 2 * config.kv_heads * tokens_per_block * config.head_dim * dtype.itemsize


def _aligned_zeros(size: int, device: torch.device) -> Tensor:
    """uint8[size] that begins on a page, as memory registration wants it."""
    try:
        memory = torch.zeros(size + mmap.PAGESIZE, dtype=torch.uint8, device=device)
        # Touch every page now: a cache that does not fit must fail at start-up, not under load.
        memory.zero_()
    except (RuntimeError, MemoryError) as error:
        raise ModelUnusable(
            f"a KV cache of {size} bytes does not fit on {device}; lower engine.num_blocks or engine.kv_cache_bytes"
        ) from error
    if device.type == "cuda" and _is_expandable(memory):
        raise ModelUnusable(
            "PYTORCH_CUDA_ALLOC_CONF: expandable_segments gives memory that other processes can not map, and hand-offs "
            "would crawl; remove the option"
        )
    begin = -memory.data_ptr() % mmap.PAGESIZE
    return memory[begin : begin + size]


def _is_expandable(memory: Tensor) -> bool:
    address = memory.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            return bool(segment.get("is_expandable", False))
    return False
