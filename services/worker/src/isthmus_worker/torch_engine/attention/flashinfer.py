"""Paged attention by FlashInfer's kernels, which read the blocks where they are.

One ragged call per layer serves all rows of a step. K and V of a layer are strided views of its pool, in FlashInfer's
HND layout ([blocks, kv_heads, tokens_per_block, head_dim]) or its NHD layout, as the cache itself is.

Layers with a window get the blocks from the first one that is seen on. In front of the window that block may hold bytes
that no peer has sent. The kernels weigh them with 0, which does not help against NaN; so whatever is not finite there
becomes 0. To others who share the block, and see all of it, that changes nothing.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from isthmus_worker.cache.base import first_seen

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import ListPlan, StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool
    from isthmus_worker.torch_engine.model_config import ModelConfig

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.float16, torch.bfloat16)
# What FlashInfer's documentation recommends for its intermediate results.
_WORKSPACE_BYTES = 128 << 20
# Layers that see the same of the same blocks: the block list, and the window.
_Kind = tuple[int, int | None]


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
    if find_spec("flashinfer") is None:
        return "the package flashinfer-python is not installed"
    return None


class FlashInferBackend:
    """`heads`: query heads of the model."""

    name = "flashinfer"

    def __init__(self, pool: KvPool, heads: int) -> None:
        self._pool, self._heads = pool, heads
        self._kinds = list(zip(pool.list_of, pool.windows, strict=True))
        # Read by one kernel at a time.
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        make = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        layout = "NHD" if pool.shape.options.nhd else "HND"
        # FA2 kernels run on every GPU from Ampere on; what "auto" takes differs from one to the next.
        self._wrappers: dict[_Kind, Any] = {kind: make(workspace, layout, backend="fa2") for kind in set(self._kinds)}
        caches = [one.transpose(2, 3) for one in pool.blocks] if pool.shape.options.nhd else pool.blocks
        self._caches = [one.unbind(1) for one in caches]

    def begin(self, plan: StepPlan) -> FlashInferStep:
        """Tells the kernels about the rows of a step."""
        for kind in self._wrappers:
            self._plan(plan.lists[kind[0]], *kind)
        rows = [torch.from_numpy(one.write_rows).to(self._pool.device) for one in plan.lists]
        parts = [(rows[number], self._wrappers[number, window]) for number, window in self._kinds]
        return FlashInferStep(self._pool, parts, self._caches)

    def _plan(self, own: ListPlan, number: int, window: int | None) -> None:
        pool, size = self._pool, self._pool.tokens_per_block
        spans = (*own.decode, *own.prefill)
        seen = [one.blocks[first_seen(window, one.start, size) :] for one in spans]
        if window is not None:
            pool.make_finite(np.array([one[0] for one in seen]), number)
        # Sizes stay on the host, where the plan is made; the list of blocks is read by the kernels.
        tokens = _offsets([one.end - one.begin for one in spans])
        pages = _offsets([len(one) for one in seen])
        last_page = torch.tensor([(one.stop - 1) % size + 1 for one in spans], dtype=torch.int32)
        self._wrappers[number, window].plan(
            tokens,
            pages,
            torch.from_numpy(np.concatenate(seen)).to(pool.device),
            last_page,
            self._heads,
            pool.kv_heads,
            pool.head_dim,
            size,
            causal=True,
            # How many positions before its own a token sees.
            window_left=-1 if window is None else window - 1,
            q_data_type=pool.dtype,
            kv_data_type=pool.dtype,
        )


class FlashInferStep:
    """Attention of one step. `parts`: of each layer, the rows that it writes, and the kernels."""

    def __init__(self, pool: KvPool, parts: list[tuple[Tensor, Any]], caches: list[tuple[Tensor, ...]]) -> None:
        self._pool, self._parts, self._caches = pool, parts, caches

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, heads + 2 * kv_heads, head_dim], rotated. Stores K and V; returns [N, heads * head_dim]."""
        pool, (write_rows, wrapper) = self._pool, self._parts[layer]
        heads = qkv.shape[1] - 2 * pool.kv_heads
        pool.rows[layer].index_copy_(0, write_rows, qkv[:, heads:].reshape(-1, pool.head_dim))
        return wrapper.run(qkv[:, :heads].contiguous(), self._caches[layer]).view(len(qkv), -1)


def _offsets(counts: list[int]) -> Tensor:
    """int32[len + 1]: where each of the intervals begins, and the end."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(counts))).astype(np.int32))
