"""The mock's KV memory, laid out as the reference engine's, so that hand-offs do the same work.

A row of `isthmus_worker.cache.layout`, K or V of one token in one layer, is bytes_per_token / 8 words of 8 bytes.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import StartError
from isthmus_worker.cache.layout import describe_cache, memory_bytes, plan_pools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_worker.cache.layout import CacheShape, Pool
    from kvtransfer.page_table import PageTable


@dataclass(frozen=True, slots=True)
class Part:
    """Layers of one group: `words` uint64[blocks, layer of the pool, K V, token, word], of which it has `within`.
    `number`: its block list; `layers`: of the model; `window`: as in the page table."""

    words: NDArray[np.uint64]
    within: NDArray[np.int64]
    layers: NDArray[np.int64]
    number: int
    window: int | None


class KvMemory:
    """Zeroed, page-aligned memory that never moves. Raises StartError when it does not fit.

    `parts`: its layers, by group.
    """

    def __init__(self, shape: CacheShape, num_blocks: Sequence[int]) -> None:
        self._shape, self._pools = shape, plan_pools(shape, num_blocks)
        size = memory_bytes(self._pools)
        try:
            memory = np.zeros(size + mmap.PAGESIZE, np.uint8)
        except MemoryError as error:
            raise StartError(
                f"a KV cache of {size} bytes does not fit; lower engine.num_blocks or engine.kv_cache_bytes"
            ) from error
        begin = -memory.ctypes.data % mmap.PAGESIZE
        self._memory = memory[begin : begin + size]
        self.parts = tuple(part for pool in self._pools for part in self._parts(pool))

    def _parts(self, pool: Pool) -> list[Part]:
        """The groups in a pool."""
        groups, words = self._shape.groups, self._words(pool)
        layers = np.array([self._shape.layers[place] for place in pool.layers], np.int64)
        of = np.array(groups.of_layer, np.int64)[layers]
        return [
            Part(words, np.flatnonzero(of == group), layers[of == group], pool.number, window)
            for group, window in enumerate(groups.windows)
            if (of == group).any()
        ]

    def _words(self, pool: Pool) -> NDArray[np.uint64]:
        tokens, words = self._shape.tokens_per_block, self._shape.row_bytes // 8
        flat = self._memory[pool.offset : pool.offset + pool.size].view(np.uint64)
        strides = (pool.block_stride, pool.layer_stride, self._shape.half_bytes, words * 8, 8)
        return np.lib.stride_tricks.as_strided(flat, (pool.num_blocks, len(pool.layers), 2, tokens, words), strides)

    def zero(self, block: int) -> None:
        """A block of every list back to the state after construction."""
        for part in self.parts:
            part.words[block] = 0

    def copy(self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int) -> None:
        """Whole blocks of one block list."""
        for part in self.parts:
            if part.number == number:
                part.words[dst[:, None], part.within] = part.words[src[:, None], part.within]

    def page_table(self) -> PageTable:
        """The memory as the transfer library sees it. Checked."""
        return describe_cache(self._shape, self._pools, int(self._memory.ctypes.data))
