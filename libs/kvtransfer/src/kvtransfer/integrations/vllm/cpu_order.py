"""Whether vLLM's kernels for CPUs keep a block in the order that `repack` reads: the kernel itself is asked."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ^ vLLM lives in an environment of its own.

from __future__ import annotations

from typing import Any

import numpy as np

from kvtransfer.errors import GeometryError
from kvtransfer.integrations.vllm.repack import halves


def check_order(cache: Any, cache_dtype: str) -> None:
    """Stores coded keys and values with the kernel that serves this layer's `cache`, and reads them back.

    Raises GeometryError when they come in another order.
    """
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    tokens, head_dim = int(cache.shape[2]), int(cache.shape[3]) // 2
    isa = _get_attn_isa(cache.dtype, tokens, head_dim, cache_dtype)
    own = cache.new_zeros((2, 1, tokens, 2 * head_dim))
    # Small whole numbers: exact in every dtype, and neighbours differ along both axes.
    coded = (np.arange(tokens)[:, None] * 7 + np.arange(head_dim)[None, :] * 3) % 127 + 1
    key = cache.new_tensor(coded.tolist())[:, None, :].contiguous()
    slots = cache.new_tensor((np.arange(tokens) + tokens).tolist()).long()
    key_cache, value_cache = own.view(2, 1, 2 * tokens, head_dim).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, -key, key_cache, value_cache, slots, isa)
    found_key, found_value = halves(own, [1], head_dim)
    if not ((found_key[0, 0] == key[:, 0]).all() and (found_value[0, 0] == -key[:, 0]).all()):
        raise GeometryError(
            "kv_cache", f"order of kernel {isa!r}", "is not known here; set repack false and pair equal instances only"
        )
