"""The KV memory of one rank as tensors. `isthmus_worker.cache.layout` says where everything lies.

The kernels address *rows* of head_dim elements, and *runs* of rows that belong together, by number. Numbers of one
layer are those of another one in the same pool shifted by a constant, so each layer has a view of its pool that begins
at its first row, and one index serves all layers of a block list.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_worker.cache.layout import describe_cache, memory_bytes, plan_pools
from isthmus_worker.torch_engine.batch import ListShape
from isthmus_worker.torch_engine.model_config import ModelUnusable
from kvtransfer.page_table import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from isthmus_worker.cache.layout import CacheShape, Pool
    from isthmus_worker.torch_engine.batch import StepPlan
    from kvtransfer.page_table import PageTable


class KvPool:
    """Zeroed memory for `num_blocks` blocks of each block list that never moves.

    `shapes`: of each block list. `list_of`, `windows`, `blocks`, `rows`, `runs` have an entry for each layer of the
    rank: its block list; what it sees; its cache [num_blocks, 2 (K, V), kv_heads, tokens_per_block, head_dim], whatever
    the order in memory; [rows, head_dim] and [runs, elements of a run], both beginning at its first row in block 0.
    """

    def __init__(
        self, shape: CacheShape, num_blocks: Sequence[int], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.device, self.dtype, self.head_dim = device, dtype, head_dim
        self.shape, self._pools = shape, plan_pools(shape, num_blocks)
        self.kv_heads, self.tokens_per_block = len(shape.kv_heads), shape.tokens_per_block
        self._memory = _aligned_zeros(memory_bytes(self._pools), device)
        self.windows = tuple(shape.groups.windows[shape.groups.of_layer[layer]] for layer in shape.layers)
        self.list_of = tuple(map(shape.list_of, shape.layers))
        views: list[tuple[Tensor, Tensor, Tensor]] = []
        # Of each pool: [num_blocks, layer, K V, head, token, head_dim].
        self._caches: list[Tensor] = []
        for pool in self._pools:
            rows = self._memory[pool.offset : pool.offset + pool.size].view(dtype).view(-1, head_dim)
            cache = self._cache_view(rows, pool)
            self._caches.append(cache)
            for at in range(len(pool.layers)):
                own = rows[at * pool.layer_stride // shape.row_bytes :]
                views.append((cache[:, at], own, own.view(-1, self._run_rows * head_dim)))
        order = np.argsort([place for pool in self._pools for place in pool.layers]).tolist()
        self.blocks = [views[at][0] for at in order]
        self.rows = [views[at][1] for at in order]
        self.runs = [views[at][2] for at in order]
        self.shapes = tuple(self._list_shape(number, count) for number, count in enumerate(num_blocks))
        # Per list and block: where the last write of a step ended, with zeros behind it; -1: nothing is known.
        self._written_to: list[NDArray[np.int64]] = [np.full(count, -1, np.int64) for count in num_blocks]

    @property
    def _run_rows(self) -> int:
        """Rows of a run: a head of a block, or all heads where tokens come first."""
        return self.tokens_per_block * (self.kv_heads if self.shape.options.nhd else 1)

    def _list_shape(self, number: int, num_blocks: int) -> ListShape:
        strides = [pool.block_stride for pool in self._pools if pool.number == number]
        # A rank without a layer of a list checks its blocks all the same, and reads none.
        block_rows = strides[0] // self.shape.row_bytes if strides else 2 * self.kv_heads * self.tokens_per_block
        window = self.shape.groups.windows[number] if self.shape.options.separate else None
        nhd = self.shape.options.nhd
        return ListShape(num_blocks, block_rows, self.kv_heads, self.tokens_per_block, nhd, window)

    def _cache_view(self, rows: Tensor, pool: Pool) -> Tensor:
        """[num_blocks, layer, K V, head, token, head_dim] over the rows of a pool."""
        heads, tokens, dim = self.kv_heads, self.tokens_per_block, self.head_dim
        block, layer = (stride // self.shape.row_bytes * dim for stride in (pool.block_stride, pool.layer_stride))
        by_head, by_token = (dim, heads * dim) if self.shape.options.nhd else (tokens * dim, dim)
        strides = (block, layer, heads * tokens * dim, by_head, by_token, 1)
        return rows.as_strided((pool.num_blocks, len(pool.layers), 2, heads, tokens, dim), strides)

    def zero(self) -> None:
        """Back to the state after construction."""
        self._memory.zero_()
        for written in self._written_to:
            written[:] = -1

    def begin_step(self, plan: StepPlan) -> None:
        """Zeroes what an earlier owner left behind the last token of a row, when a row enters a block.

        A padded context reads the whole last block. Masked scores weigh nothing, but nothing times NaN is NaN.
        """
        for number, (one, written) in enumerate(zip(plan.lists, self._written_to, strict=True)):
            entered = written[one.tail_blocks] != plan.tail_begin
            ends = plan.tail_end[entered].tolist()
            for block, end in zip(one.tail_blocks[entered].tolist(), ends, strict=True):
                for cache in self._caches_of(number):
                    cache[block, :, :, :, end:] = 0
            written[one.write_blocks] = -1
            written[one.tail_blocks] = plan.tail_end

    def copy(self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int = 0) -> None:
        """Whole blocks of one block list, int32[N] each; none of `dst` is in `src`."""
        from_, to = (torch.as_tensor(ids, dtype=torch.int64, device=self.device) for ids in (src, dst))
        for cache in self._caches_of(number):
            cache[to] = cache[from_]
        self._written_to[number][dst] = -1

    def make_finite(self, blocks: NDArray[np.integer], number: int) -> None:
        """What is not finite in these blocks, int[N], of one block list becomes 0."""
        ids = torch.as_tensor(np.unique(blocks), dtype=torch.int64, device=self.device)
        for cache in self._caches_of(number):
            cache[ids] = cache[ids].nan_to_num_(0.0, 0.0, 0.0)

    def _caches_of(self, number: int) -> list[Tensor]:
        return [cache for cache, pool in zip(self._caches, self._pools, strict=True) if pool.number == number]

    def page_table(self) -> PageTable:
        """The memory as the transfer library sees it. Checked."""
        kind = MemoryKind.VRAM if self.device.type == "cuda" else MemoryKind.DRAM
        return describe_cache(self.shape, self._pools, self._memory.data_ptr(), kind, self.device.index or 0)


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
