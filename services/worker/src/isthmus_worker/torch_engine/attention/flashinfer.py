"""Paged attention by FlashInfer's kernels, which read the blocks where they are.

One ragged call per layer serves all rows of a step. K and V of a layer are strided views of its pool, in FlashInfer's
HND layout ([blocks, kv_heads, tokens_per_block, head_dim]) or its NHD layout, as the cache itself is.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool
    from isthmus_worker.torch_engine.model_config import ModelConfig

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# What FlashInfer's documentation recommends for its intermediate results.
_WORKSPACE_BYTES = 128 << 20


def why_not_flashinfer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why these kernels can not compute the model here; None when they can."""
    if device.type != "cuda":
        return f"it needs engine.device = cuda, which is {device.type}"
    if dtype not in _DTYPES:
        return f"it computes float16 and bfloat16, model.dtype is {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in _HEAD_DIMS:
        return (
            f"it has kernels for heads of {', '.join(map(str, _HEAD_DIMS))}, those of the model are {config.head_dim}"
        )
    if any(window is not None for window in config.windows):
        # In front of a window a block may hold bytes that no peer has sent. The kernels weigh them with 0, which does
        # not help against NaN, and the block may be another request's too: it can not be cleaned.
        return "the model has layers with a sliding window"
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


class FlashInferBackend:
    """`heads`: query heads of the model."""

    name = "flashinfer"

    def __init__(self, pool: KvPool, heads: int) -> None:
        self._pool, self._heads = pool, heads
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        # FA2 kernels run on every GPU from Ampere on; what "auto" takes differs from one to the next.
        self._wrapper: Any = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD" if pool.shape.options.nhd else "HND", backend="fa2"
        )
        caches = [one.transpose(2, 3) for one in pool.blocks] if pool.shape.options.nhd else pool.blocks
        self._caches = [one.unbind(1) for one in caches]

    def begin(self, plan: StepPlan) -> FlashInferStep:
        """Tells the kernels about the rows of a step."""
        pool = self._pool
        spans = (*plan.lists[0].decode, *plan.lists[0].prefill)
        size = pool.tokens_per_block
        # Sizes stay on the host, where the plan is made; the list of blocks is read by the kernels.
        tokens = _offsets([one.end - one.begin for one in spans])
        pages = _offsets([len(one.blocks) for one in spans])
        last_page = torch.tensor([(one.stop - 1) % size + 1 for one in spans], dtype=torch.int32)
        blocks = torch.from_numpy(np.concatenate([one.blocks for one in spans])).to(pool.device)
        dtype = pool.dtype
        self._wrapper.plan(
            tokens,
            pages,
            blocks,
            last_page,
            self._heads,
            pool.kv_heads,
            pool.head_dim,
            size,
            causal=True,
            q_data_type=dtype,
            kv_data_type=dtype,
        )
        return FlashInferStep(plan, pool, self._wrapper, self._caches)


class FlashInferStep:
    """Attention of one step."""

    def __init__(self, plan: StepPlan, pool: KvPool, wrapper: Any, caches: list[tuple[Tensor, ...]]) -> None:
        self._pool, self._wrapper, self._caches = pool, wrapper, caches
        self._write_rows = torch.from_numpy(plan.lists[0].write_rows).to(pool.device)

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, heads + 2 * kv_heads, head_dim], rotated. Stores K and V; returns [N, heads * head_dim]."""
        pool = self._pool
        heads = qkv.shape[1] - 2 * pool.kv_heads
        pool.rows[layer].index_copy_(0, self._write_rows, qkv[:, heads:].reshape(-1, pool.head_dim))
        return self._wrapper.run(qkv[:, :heads].contiguous(), self._caches[layer]).view(len(qkv), -1)


def _offsets(counts: list[int]) -> Tensor:
    """int32[len + 1]: where each of the intervals begins, and the end."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
