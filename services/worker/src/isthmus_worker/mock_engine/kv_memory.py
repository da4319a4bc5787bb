"""The mock's KV memory: slot-major like the reference engine's, so that hand-offs do the same work.

    slot | layer 0                  | layer 1 ...
         | K [token][word] | V ...  |

A word is 8 bytes; a token has bytes_per_token / 8 of them for K and as many for V, in each layer.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from isthmus_core.errors import StartError
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


class KvMemory:
    """Zeroed, page-aligned memory that never moves. Raises StartError when it does not fit."""

    def __init__(self, num_blocks: int, layers: int, tokens_per_block: int, bytes_per_token: int) -> None:
        self.layers, self.tokens_per_block = layers, tokens_per_block
        self.block_bytes = layers * 2 * tokens_per_block * bytes_per_token
        size = num_blocks * self.block_bytes
        try:
            memory = np.zeros(size + mmap.PAGESIZE, np.uint8)
        except MemoryError as error:
            raise StartError(
                f"a KV cache of {size} bytes does not fit; lower engine.num_blocks or engine.kv_cache_bytes"
            ) from error
        begin = -memory.ctypes.data % mmap.PAGESIZE
        self._memory = memory[begin : begin + size]
        # uint64[blocks, layer and K or V, token, word]
        self.words: NDArray[np.uint64] = self._memory.view(np.uint64).reshape(
            num_blocks, layers * 2, tokens_per_block, bytes_per_token // 8
        )

    def zero(self) -> None:
        """Back to the state after construction."""
        self._memory.fill(0)

    def page_table(self) -> PageTable:
        """The memory as the transfer library sees it. Checked."""
        base, blocks = int(self._memory.ctypes.data), len(self.words)
        region = RegisteredRegion(base, blocks * self.block_bytes, MemoryKind.DRAM)
        pool = PhysicalPool(base, slot_bytes=self.block_bytes, num_slots=blocks, layer_stride_bytes=0)
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
        return PoolView(frozenset({role}), MapperKind.HND, 0, entries, HeadInterval(0, 1))
