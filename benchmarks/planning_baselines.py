"""What `planning.py` compares with: the obvious loop over blocks, and plain numpy without a plan made beforehand.

Both handle what the cases need: one attention group, head intervals, equal layouts, equal or unequal block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import AttentionGroup, MapperKind, PageTable, PoolView
    from kvtransfer.rank_info import RankInfo


@dataclass(frozen=True)
class Half:
    """One side of a request: storage and block list."""

    rank: RankInfo
    blocks: NDArray[np.int32]

    @property
    def table(self) -> PageTable:
        """The storage."""
        return self.rank.page_table

    @property
    def group(self) -> AttentionGroup:
        """Its attention layers."""
        group = self.table.groups[0]
        if not hasattr(group, "tokens_per_block"):
            raise TypeError("the first group of a case is attention")
        return group  # type: ignore[return-value]


def per_block_loop(
    src: Half, dst: Half, layers: Sequence[int], tokens: int, kind: MapperKind
) -> list[tuple[int, int, int]]:
    """(source, destination, bytes) of every run, one by one."""
    runs: list[tuple[int, int, int]] = []
    for mine, yours in zip(src.group.views, dst.group.views, strict=True):
        heads = shared_heads(mine, yours)
        for layer in layers:
            unit = unit_bytes(mine, src.group.tokens_per_block)
            at = 0
            while at < tokens:
                block, phase = divmod(at, src.group.tokens_per_block)
                other, other_phase = divmod(at, dst.group.tokens_per_block)
                count = min(src.group.tokens_per_block - phase, dst.group.tokens_per_block - other_phase)
                a = buffer_address(src, mine, layer, int(src.blocks[block]))
                b = buffer_address(dst, yours, layer, int(dst.blocks[other]))
                for head in heads:
                    i, j = head - mine.kv_heads.begin, head - yours.kv_heads.begin
                    if kind.name == "NHD" and len(heads) * unit != mine.entries.size[0] // src.group.tokens_per_block:
                        for token in range(count):
                            x = a + ((phase + token) * len(mine.kv_heads) + i) * unit
                            y = b + ((other_phase + token) * len(yours.kv_heads) + j) * unit
                            runs.append((x, y, unit))
                        continue
                    x = a + (i * src.group.tokens_per_block + phase) * unit
                    y = b + (j * dst.group.tokens_per_block + other_phase) * unit
                    runs.append((x, y, count * unit))
                at += count
    return runs


def plain_numpy(
    src: Half, dst: Half, layers: Sequence[int], tokens: int, kind: MapperKind
) -> tuple[NDArray[np.int64], ...]:
    """The same with one array operation for each layer, head and view: (source, destination, bytes)."""
    a_tokens, b_tokens = src.group.tokens_per_block, dst.group.tokens_per_block
    starts = np.unique(np.concatenate((np.arange(0, tokens, a_tokens), np.arange(0, tokens, b_tokens))))
    count = np.diff(starts, append=tokens)
    mine_ids, your_ids = (
        src.blocks.astype(np.int64)[starts // a_tokens],
        dst.blocks.astype(np.int64)[starts // b_tokens],
    )
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]] = []
    for mine, yours in zip(src.group.views, dst.group.views, strict=True):
        unit, heads = unit_bytes(mine, a_tokens), shared_heads(mine, yours)
        for layer in layers:
            a = buffer_address(src, mine, layer, 0) + mine_ids * src.table.pools[mine.pool].slot_stride
            b = buffer_address(dst, yours, layer, 0) + your_ids * dst.table.pools[yours.pool].slot_stride
            for head in heads:
                i, j = head - mine.kv_heads.begin, head - yours.kv_heads.begin
                if kind.name == "NHD":
                    token = np.arange(tokens)
                    piece = np.repeat(np.arange(len(starts)), count)
                    x = a[piece] + (token % a_tokens * len(mine.kv_heads) + i) * unit
                    y = b[piece] + (token % b_tokens * len(yours.kv_heads) + j) * unit
                    parts.append((x, y, np.full(tokens, unit, np.int64)))
                    continue
                x = a + (i * a_tokens + starts % a_tokens) * unit
                y = b + (j * b_tokens + starts % b_tokens) * unit
                parts.append((x, y, count * unit))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def shared_heads(mine: PoolView, yours: PoolView) -> range:
    """Global heads that both views hold."""
    return range(max(mine.kv_heads.begin, yours.kv_heads.begin), min(mine.kv_heads.end, yours.kv_heads.end))


def unit_bytes(view: PoolView, tokens: int) -> int:
    """Bytes of one token of one head."""
    return int(view.entries.size[0]) // (tokens * len(view.kv_heads))


def buffer_address(half: Half, view: PoolView, layer: int, block: int) -> int:
    """Where a buffer of one block begins."""
    pool = half.table.pools[view.pool]
    offset = int(view.entries.offset[layer])
    return pool.base_address + layer * pool.layer_stride + block * pool.slot_stride + offset
