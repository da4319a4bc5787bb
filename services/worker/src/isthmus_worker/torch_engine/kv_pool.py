"""The KV memory of one rank: one slot per block, and everything of a block inside its slot.

    slot | layer 0                              | layer 1 ...
         | K: head 0 [T][D] | head 1 [T][D] ... | V: head 0 [T][D] ... |            T = tokens_per_block, D = head_dim

A head of one layer in one block is one contiguous run of T * D elements; the kernels address runs, or rows of D
elements, by number. Numbers of layer l are those of layer 0 shifted by a constant, so each layer has a view of the
pool that begins at its first run, and one index serves all layers.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_worker.torch_engine.model_config import ModelUnusable
from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.model_config import ModelConfig


class KvPool:
    """Zeroed memory for `num_blocks` blocks that never moves. Sizes in bytes unless a name says otherwise."""

    def __init__(
        self, config: ModelConfig, num_blocks: int, tokens_per_block: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.kv_heads = config.kv_heads
        self.layers = config.layers
        self.head_dim = config.head_dim
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

    def page_table(self) -> PageTable:
        """The memory as the transfer library sees it. Checked."""
        base = self._memory.data_ptr()
        cuda = self._memory.device.type == "cuda"
        region = RegisteredRegion(
            base_address=base,
            size_bytes=self.num_blocks * self.block_bytes,
            memory_kind=MemoryKind.VRAM if cuda else MemoryKind.DRAM,
            device_id=self._memory.device.index or 0,
        )
        pool = PhysicalPool(base, slot_bytes=self.block_bytes, num_slots=self.num_blocks, layer_stride_bytes=0)
        views = tuple(self._view(role, half) for half, role in enumerate(("key", "value")))
        group = AttentionGroup(tuple(range(self.layers)), self.tokens_per_block, views)
        table = PageTable((region,), (pool,), (group,))
        table.validate()
        return table

    def _view(self, role: str, half: int) -> PoolView:
        half_bytes = self.block_bytes // (self.layers * 2)
        layer = np.arange(self.layers, dtype=np.uint32)
        offset = (layer.astype(np.uint64) * np.uint64(2) + np.uint64(half)) * np.uint64(half_bytes)
        entries = BufferEntries(layer, offset, np.full(self.layers, half_bytes, np.uint32))
        return PoolView(frozenset({role}), MapperKind.HND, 0, entries, HeadInterval(0, self.kv_heads))


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
