"""Caches whose kernels store a block in an order of their own are brought into a plain one beside them, and back.

    vLLM on a CPU    [block][head] | K: head_dim x tokens, transposed | V: tokens x head_dim |
    beside it        [block][layer] | K: head, token, head_dim | V: head, token, head_dim |

A prompt is packed when it is complete, before its blocks are offered; what a peer has written is unpacked before vLLM
hears of it. The tensors say nothing of this order, so it is tried out on the kernel itself when the worker starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvtransfer.errors import GeometryError
from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)
from kvtransfer.pools import MapperKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.integrations.vllm.page_tables import AttentionLayers

_ROLES = ("key", "value")


class PackedGroup:
    """The plain copy of one cache group. Memory of blocks that are never handed off is never touched."""

    def __init__(self, group: AttentionLayers) -> None:
        layer, first = group.tensors[0]
        blocks, heads, tokens, _ = first.shape
        widths = [width for _, width in group.content]
        if tuple(role for role, _ in group.content) != _ROLES or widths[0] != widths[1] or group.kv_heads is None:
            raise GeometryError(
                f"layer {layer}", group.content, "only K and V of equal width are packed; set repack false"
            )
        if tokens != group.block:
            raise GeometryError(f"layer {layer}", f"{tokens} tokens", f"blocks of {group.block} are packed whole")
        self._group, self._tensors = group, [tensor for _, tensor in group.tensors]
        self._head_dim = widths[0] // first.element_size()
        cache: Any = first
        # [block, layer, K or V, head, token, head_dim]
        self.plain: Any = cache.new_zeros((blocks, len(self._tensors), 2, heads, tokens, self._head_dim))

    def pack(self, blocks: list[int]) -> None:
        """From vLLM's cache into the copy."""
        for number, cache in enumerate(self._tensors):
            key, value = halves(cache, blocks, self._head_dim)
            self.plain[blocks, number, 0] = key
            self.plain[blocks, number, 1] = value

    def unpack(self, blocks: list[int]) -> None:
        """From the copy into vLLM's cache."""
        for number, cache in enumerate(self._tensors):
            tensor: Any = cache
            count, heads, tokens = len(blocks), tensor.shape[1], tensor.shape[2]
            made = tensor.new_empty((count, heads, 2, tokens * self._head_dim))
            plain = self.plain[blocks, number]
            made[:, :, 0] = plain[:, 0].transpose(-1, -2).reshape(count, heads, -1)
            made[:, :, 1] = plain[:, 1].reshape(count, heads, -1)
            tensor[blocks] = made.view(count, heads, tokens, -1)

    def describe(self, pool: int) -> tuple[RegisteredRegion, PhysicalPool, AttentionGroup]:
        """The copy as part number `pool` of a page table."""
        plain, group = self.plain, self._group
        base, slot = int(plain.data_ptr()), int(plain.stride()[0] * plain.element_size())
        layers, half = len(self._tensors), slot // (2 * len(self._tensors))
        heads = group.kv_heads
        if heads is None:
            raise GeometryError("kv_heads", "None", "only caches with heads are packed")
        views = tuple(
            PoolView(frozenset({role}), MapperKind.HND, pool, _buffers(layers, half, nth), heads)
            for nth, role in enumerate(_ROLES)
        )
        region = RegisteredRegion(base, slot * int(plain.shape[0]), MemoryKind.DRAM)
        attention = AttentionGroup(
            tuple(layer for layer, _ in group.tensors), group.block, views, group.window, group.draft_slack
        )
        return region, PhysicalPool(base, slot, int(plain.shape[0]), layer_stride_bytes=0), attention


def halves(cache: Any, blocks: list[int], head_dim: int) -> tuple[Any, Any]:
    """K and V, [block, head, token, head_dim] each, of blocks as the kernel stores them."""
    picked = cache[blocks]
    count, heads, tokens, _ = picked.shape
    parts = picked.reshape(count, heads, 2, tokens * head_dim)
    key = parts[:, :, 0].reshape(count, heads, head_dim, tokens).transpose(-1, -2)
    return key, parts[:, :, 1].reshape(count, heads, tokens, head_dim)


def _buffers(layers: int, half: int, nth: int) -> BufferEntries:
    offset: NDArray[np.uint64] = (np.arange(layers, dtype=np.uint64) * np.uint64(2) + np.uint64(nth)) * np.uint64(half)
    return BufferEntries(np.arange(layers, dtype=np.uint32), offset, np.full(layers, half, np.uint32))


class Packed:
    """The plain copies of a rank's cache groups."""

    def __init__(self, groups: Sequence[AttentionLayers]) -> None:
        self._groups = [PackedGroup(group) for group in groups]

    def table(self) -> PageTable:
        """The page table of the copies, checked."""
        parts = [group.describe(number) for number, group in enumerate(self._groups)]
        regions, pools, groups = zip(*parts, strict=True)
        table = PageTable(regions, pools, groups)
        table.validate()
        return table

    def pack(self, blocks: Sequence[Sequence[int]]) -> None:
        """Blocks of each group, from vLLM's cache."""
        for group, ids in zip(self._groups, blocks, strict=True):
            if ids:
                group.pack(list(ids))

    def unpack(self, blocks: Sequence[Sequence[int]]) -> None:
        """Blocks of each group, into vLLM's cache."""
        for group, ids in zip(self._groups, blocks, strict=True):
            if ids:
                group.unpack(list(ids))
