"""Which tokens of a sequence a context-parallel rank holds, and where: local numbers <-> global positions.

    INTERLEAVED  |0|1|2|0|1|2|0|1|2|…      pieces of `granularity` tokens dealt out in turn, whatever the prompt length
    CONTIGUOUS   |  0  |  1  |  2  |       shards of S = granularity * ceil(P / (n * granularity)) tokens, cut at P
    ZIGZAG       |0|1|2|2|1|0|             2n pieces of S, half as long; shard r has pieces r and 2n-1-r, so that causal
                                           attention costs every rank the same

A rank numbers its tokens 0, 1, 2 … in order of position; block j of a sequence holds local tokens [j*T, (j+1)*T).
P is the prompt length, positions count from 0. Everything here is closed form: no loop over tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.layer_groups import ShardingKind, TokenSharding

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count`. `sharding` None: all tokens."""

    sharding: TokenSharding | None = None
    count: int = 1
    index: int = 0

    @property
    def whole(self) -> bool:
        """True when every token is here."""
        return self.sharding is None or self.count == 1

    def local_count(self, position: int, prompt: int) -> int:
        """How many of the tokens [0, position) are here. position <= prompt."""
        if self.sharding is None or self.count == 1:
            return position
        grain, size = self.sharding.granularity, self._size(prompt)
        if self.sharding.kind is ShardingKind.INTERLEAVED:
            rounds, rest = divmod(position, grain * self.count)
            return rounds * grain + min(max(rest - self.index * grain, 0), grain)
        first = min(max(position - self.index * size, 0), size)
        if self.sharding.kind is ShardingKind.CONTIGUOUS:
            return first
        return first + min(max(position - self._second(size), 0), size)

    def position(self, local: int, prompt: int) -> int:
        """Global position of a local token; `prompt` when the sequence has fewer local tokens."""
        if local >= self.local_count(prompt, prompt):
            return prompt
        if self.sharding is None or self.count == 1:
            return local
        grain, size = self.sharding.granularity, self._size(prompt)
        if self.sharding.kind is ShardingKind.INTERLEAVED:
            rounds, rest = divmod(local, grain)
            return (rounds * self.count + self.index) * grain + rest
        if local < size:
            return self.index * size + local
        return self._second(size) + local - size

    def borders(self, begin: int, end: int, block: int, prompt: int) -> NDArray[np.int64]:
        """Positions in (begin, end) where a local block or a piece of the shard begins, or a piece ends. Unsorted,
        int64[N], a superset: between two of them the local numbers of held tokens run on inside one block."""
        if self.sharding is None or self.count == 1:
            return np.arange((begin // block + 1) * block, end, block, dtype=np.int64)
        grain, size = self.sharding.granularity, self._size(prompt)
        if self.sharding.kind is ShardingKind.INTERLEAVED:
            cuts = np.arange((begin // grain + 1) * grain, end, grain, dtype=np.int64)
        else:
            pieces = self.count * (2 if self.sharding.kind is ShardingKind.ZIGZAG else 1)
            cuts = np.arange(pieces + 1, dtype=np.int64) * size
        low, high = self.local_count(begin, prompt), self.local_count(end, prompt)
        blocks = self._positions(np.arange((low // block + 1) * block, high, block, dtype=np.int64), size)
        cuts = np.concatenate((cuts, blocks))
        return cuts[(cuts > begin) & (cuts < end)]

    def locals_of(self, positions: NDArray[np.int64], prompt: int) -> NDArray[np.int64]:
        """Local number of every position, -1 where another shard holds it. int64[N] both."""
        if self.sharding is None or self.count == 1:
            return positions
        grain, size = self.sharding.granularity, self._size(prompt)
        if self.sharding.kind is ShardingKind.INTERLEAVED:
            piece, rest = positions // grain, positions % grain
            return np.where(piece % self.count == self.index, piece // self.count * grain + rest, -1)
        first = positions - self.index * size
        inside = (first >= 0) & (first < size)
        local = np.where(inside, first, -1)
        if self.sharding.kind is ShardingKind.ZIGZAG:
            second = positions - self._second(size)
            local = np.where((second >= 0) & (second < size), second + size, local)
        return local

    def _positions(self, local: NDArray[np.int64], size: int) -> NDArray[np.int64]:
        if self.sharding is None:
            return local
        if self.sharding.kind is ShardingKind.INTERLEAVED:
            grain = self.sharding.granularity
            return (local // grain * self.count + self.index) * grain + local % grain
        first = self.index * size + local
        if self.sharding.kind is ShardingKind.CONTIGUOUS:
            return first
        return np.where(local < size, first, self._second(size) + local - size)

    def _second(self, size: int) -> int:
        """Where the second piece of a zigzag shard begins."""
        return (2 * self.count - 1 - self.index) * size

    def _size(self, prompt: int) -> int:
        """Tokens of one piece of a CONTIGUOUS or ZIGZAG sharding."""
        if self.sharding is None:
            return prompt
        pieces = self.count * (2 if self.sharding.kind is ShardingKind.ZIGZAG else 1)
        grain = self.sharding.granularity
        return grain * -(-prompt // (pieces * grain))
