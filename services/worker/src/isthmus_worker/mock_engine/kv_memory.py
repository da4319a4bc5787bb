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
from kvtransfer.page_table import HeadInterval
from kvtransfer.storage import describe_attention_pool

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.page_table import PageTable


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
        return describe_attention_pool(
            base_address=int(self._memory.ctypes.data),
            num_blocks=len(self.words),
            block_bytes=self.block_bytes,
            layers=range(self.layers),
            kv_heads=HeadInterval(0, 1),
            tokens_per_block=self.tokens_per_block,
        )
