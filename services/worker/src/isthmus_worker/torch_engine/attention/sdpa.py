"""Paged attention by gathering: read each context back in order and attend with torch's own kernels.

Query heads of one KV head are folded into the query's token axis when a row has one token, so that K and V are never
repeated: [rows, kv_heads, group, head_dim] attends to [rows, kv_heads, context, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from isthmus_worker.torch_engine.attention.reads import decode_reads, prefill_read

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.attention.reads import DecodeRead, PrefillRead
    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool


class SdpaBackend:
    """`scaled_dot_product_attention` on any device and dtype, over a cache in any layout."""

    name = "sdpa"

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._scratch = _Scratch(pool)

    def begin(self, plan: StepPlan) -> SdpaStep:
        """Index tensors and masks of one step, made once for all layers that see the same of the same blocks."""
        pool = self._pool
        kinds = list(zip(pool.list_of, pool.windows, strict=True))
        parts = {kind: _Parts(plan, pool, *kind) for kind in set(kinds)}
        return SdpaStep(pool, [parts[kind] for kind in kinds], self._scratch)


class SdpaStep:
    """Attention of one step."""

    def __init__(self, pool: KvPool, parts: list[_Parts], scratch: _Scratch) -> None:
        self._pool, self._parts, self._scratch = pool, parts, scratch

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, heads + 2 * kv_heads, head_dim], rotated. Stores K and V; returns [N, heads * head_dim]."""
        pool, parts = self._pool, self._parts[layer]
        heads = qkv.shape[1] - 2 * pool.kv_heads
        query, keys_values = qkv[:, :heads], qkv[:, heads:]
        pool.rows[layer].index_copy_(0, parts.write_rows, keys_values.reshape(-1, pool.head_dim))
        outs = [self._attend_decode(layer, query[one.begin : one.end], one) for one in parts.decode]
        for one in parts.prefill:
            rows = slice(one.begin, one.end)
            outs.append(self._attend_prefill(layer, query[rows], keys_values[rows], one))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_decode(self, layer: int, query: Tensor, part: _Decode) -> Tensor:
        rows, heads, dim = query.shape
        both = self._scratch.gather(layer, part.runs, rows, part.context)
        if part.unseen is not None:
            both.masked_fill_(part.unseen, 0)
        folded = query.reshape(rows, self._pool.kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(folded, both[0], both[1], attn_mask=part.mask)
        return out.reshape(rows, heads * dim)

    def _attend_prefill(self, layer: int, query: Tensor, keys_values: Tensor, part: _Prefill) -> Tensor:
        tokens, heads, dim = query.shape
        if part.runs is None:
            # The whole context is in this step.
            keys, values = keys_values.transpose(0, 1)[None].chunk(2, 1)
        else:
            both = self._scratch.gather(layer, part.runs, 1, part.context)
            both[..., : part.blank, :] = 0
            keys, values = both
        out = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None],
            keys,
            values,
            attn_mask=part.mask,
            is_causal=part.mask is None,
            enable_gqa=heads != self._pool.kv_heads,
        )
        return out[0].transpose(0, 1).reshape(tokens, heads * dim)


@dataclass(frozen=True, slots=True)
class _Decode:
    begin: int
    end: int
    runs: Tensor
    context: int  # tokens that are kept of the gathered blocks
    mask: Tensor | None  # [rows, 1, 1, context], added to the scores
    unseen: Tensor | None  # bool[rows, 1, context, 1]: what a peer need not have sent, to be blanked


@dataclass(frozen=True, slots=True)
class _Prefill:
    begin: int
    end: int
    runs: Tensor | None
    context: int
    blank: int  # as many of the first gathered tokens are to be blanked
    mask: Tensor | None  # [tokens, context], or a bias that stands for one; None: plain causal


class _Parts:
    """What the layers of one block list and one window share."""

    def __init__(self, plan: StepPlan, pool: KvPool, number: int, window: int | None) -> None:
        own, shape = plan.lists[number], pool.shapes[number]
        self.write_rows = torch.from_numpy(own.write_rows).to(pool.device)
        self.decode = [_decode_part(one, pool) for one in decode_reads(own.decode, shape, window)]
        self.prefill = [_prefill_part(prefill_read(one, shape, window), pool, window) for one in own.prefill]


def _decode_part(read: DecodeRead, pool: KvPool) -> _Decode:
    context = int(read.high.max())
    mask = unseen = None
    if int(read.high.min()) < context or read.low.any():
        at = torch.arange(context)[None]
        visible = (at < torch.from_numpy(read.high)[:, None]) & (at >= torch.from_numpy(read.low)[:, None])
        mask = _added(visible, pool)[:, None, None]
        if read.low.any():
            unseen = ~visible[:, None, :, None].to(pool.device)
    return _Decode(read.begin, read.end, torch.from_numpy(read.runs).to(pool.device), context, mask, unseen)


def _prefill_part(read: PrefillRead, pool: KvPool, window: int | None) -> _Prefill:
    mask = None
    windowed = window is not None and window < read.stop
    if read.start > 0 and not windowed and pool.device.type == "cuda":
        # No mask to read: the fused kernels know this one, and with one of ours they would not take grouped heads.
        mask = causal_lower_right(read.stop - read.start, read.stop - read.first)
    elif read.start > 0 or windowed:
        keys, queries = torch.arange(read.first, read.stop)[None], torch.arange(read.start, read.stop)[:, None]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        mask = _added(visible, pool)
    runs = None if read.runs is None else torch.from_numpy(read.runs).to(pool.device)
    return _Prefill(read.begin, read.end, runs, read.stop - read.first, read.low - read.first, mask)


def _added(visible: Tensor, pool: KvPool) -> Tensor:
    """0 where visible, -inf elsewhere, in the dtype of the scores: kernels would convert a bool mask per layer."""
    mask = torch.zeros(visible.shape, dtype=pool.dtype).masked_fill_(~visible, float("-inf"))
    return mask.to(pool.device)


class _Scratch:
    """Where contexts are gathered, for the length of one kernel call.

    Kept from call to call: the C library gives large memory back at once, and fresh pages cost more than the copy.
    """

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self._memory = pool.rows[0].new_empty(0)

    def gather(self, layer: int, runs: Tensor, rows: int, context: int) -> Tensor:
        """K and V, [2, rows, kv_heads, context, head_dim], valid until the next call."""
        pool = self._pool
        source = pool.runs[layer]
        size = len(runs) * source.shape[1]
        if len(self._memory) < size:
            self._memory = pool.rows[0].new_empty(size)
        out = self._memory[:size].view(len(runs), -1)
        torch.index_select(source, 0, runs, out=out)
        if pool.shape.options.nhd:
            return out.view(2, rows, -1, pool.kv_heads, pool.head_dim)[:, :, :context].transpose(2, 3)
        return out.view(2, rows, pool.kv_heads, -1, pool.head_dim)[..., :context, :]
