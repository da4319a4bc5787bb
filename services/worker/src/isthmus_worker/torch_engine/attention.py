"""Paged attention by gathering: write this step's K and V, read each context back in order, attend.

Query heads of one KV head are folded into the query's token axis when a row has one token, so that K and V are never
repeated: [rows, kv_heads, group, head_dim] attends to [rows, kv_heads, context, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import DecodeGroup, PrefillRow, StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class _Decode:
    begin: int
    end: int
    runs: Tensor  # int64[2 * rows * kv_heads * blocks]
    context: int  # tokens that are kept of the gathered blocks
    mask: Tensor | None  # [rows, 1, 1, context], added to the scores


@dataclass(frozen=True, slots=True)
class _Prefill:
    begin: int
    end: int
    runs: Tensor | None  # int64[2 * kv_heads * blocks]
    context: int
    mask: Tensor | None  # [tokens, context]; None: plain causal


class Attention:
    """The attention of one step: index tensors and masks are made once and serve every layer."""

    def __init__(self, plan: StepPlan, pool: KvPool) -> None:
        self._pool = pool
        self._device = pool.blocks.device
        self._write_rows = torch.from_numpy(plan.write_rows).to(self._device)
        self._decode = [self._decode_part(group) for group in plan.decode]
        self._prefill = [self._prefill_part(row) for row in plan.prefill]

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, heads + 2 * kv_heads, head_dim], rotated. Stores K and V; returns [N, heads * head_dim]."""
        heads = qkv.shape[1] - 2 * self._pool.kv_heads
        query, keys_values = qkv[:, :heads], qkv[:, heads:]
        self._pool.rows[layer].index_copy_(0, self._write_rows, keys_values.reshape(-1, self._pool.head_dim))
        parts = [self._attend_decode(layer, query[part.begin : part.end], part) for part in self._decode]
        for part in self._prefill:
            rows = slice(part.begin, part.end)
            parts.append(self._attend_prefill(layer, query[rows], keys_values[rows], part))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decode(self, layer: int, query: Tensor, part: _Decode) -> Tensor:
        rows, heads, dim = query.shape
        keys, values = self._gather(layer, part.runs, rows, part.context)
        folded = query.reshape(rows, self._pool.kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=part.mask)
        return out.reshape(rows, heads * dim)

    def _attend_prefill(self, layer: int, query: Tensor, keys_values: Tensor, part: _Prefill) -> Tensor:
        tokens, heads, dim = query.shape
        if part.runs is None:
            # The whole context is in this step.
            keys, values = keys_values.transpose(0, 1)[None].chunk(2, 1)
        else:
            keys, values = self._gather(layer, part.runs, 1, part.context)
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.mask is None,
            enable_gqa=heads != self._pool.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * dim)

    def _gather(self, layer: int, runs: Tensor, rows: int, context: int) -> tuple[Tensor, Tensor]:
        """K and V, each [rows, kv_heads, context, head_dim]."""
        pool = self._pool
        both = pool.runs[layer].index_select(0, runs).view(2, rows, pool.kv_heads, -1, pool.head_dim)
        keys, values = both[..., :context, :].unbind(0)
        return keys, values

    def _decode_part(self, group: DecodeGroup) -> _Decode:
        context = int(group.lengths[0])
        mask = None
        if int(group.lengths[-1]) < context:
            lengths = torch.from_numpy(group.lengths)[:, None]
            mask = self._mask(torch.arange(context)[None] < lengths)[:, None, None]
        return _Decode(group.begin, group.end, torch.from_numpy(group.runs).to(self._device), context, mask)

    def _prefill_part(self, row: PrefillRow) -> _Prefill:
        context = row.start + row.end - row.begin
        if row.runs is None:
            return _Prefill(row.begin, row.end, None, context, None)
        visible = torch.arange(context)[None] <= torch.arange(row.start, context)[:, None]
        return _Prefill(row.begin, row.end, torch.from_numpy(row.runs).to(self._device), context, self._mask(visible))

    def _mask(self, visible: Tensor) -> Tensor:
        """0 where visible, -inf elsewhere, in the dtype of the scores: kernels would convert a bool mask per layer."""
        mask = torch.zeros(visible.shape, dtype=self._pool.blocks.dtype).masked_fill_(~visible, float("-inf"))
        return mask.to(self._device)
