"""Attention over the paged cache: one interface, and the kernels behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from isthmus_worker.torch_engine.attention.flashinfer import FlashInferBackend, why_not_flashinfer
from isthmus_worker.torch_engine.attention.sdpa import SdpaBackend
from isthmus_worker.torch_engine.model_config import ModelUnusable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool
    from isthmus_worker.torch_engine.model_config import ModelConfig


class AttentionStep(Protocol):
    """Attention of all layers in one step, called once per layer in order."""

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """qkv [N, heads + 2 * kv_heads, head_dim], rotated. Stores K and V; returns [N, heads * head_dim]."""
        ...


class AttentionBackend(Protocol):
    """Kernels over one pool. `name` is what logs and metrics say."""

    name: str

    def begin(self, plan: StepPlan) -> AttentionStep:
        """Whatever the layers of a step share."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """`name` of the kernels, and why these, for people."""

    name: str
    reason: str


def choose_attention(asked: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> AttentionChoice:
    """`asked`: engine.attention. Raises ModelUnusable when it names kernels that can not compute the model here."""
    if asked == "sdpa":
        return AttentionChoice("sdpa", "engine.attention = sdpa")
    problem = why_not_flashinfer(config, dtype, device)
    if problem is None:
        return AttentionChoice("flashinfer", f"engine.attention = {asked}")
    if asked == "flashinfer":
        raise ModelUnusable(f"engine.attention = flashinfer: {problem}; write sdpa or auto")
    return AttentionChoice("sdpa", f"not flashinfer: {problem}")


def open_attention(choice: AttentionChoice, heads: int, pool: KvPool) -> AttentionBackend:
    """The chosen kernels over `pool`, for `heads` query heads."""
    if choice.name == "flashinfer":
        return FlashInferBackend(pool, heads)
    return SdpaBackend(pool)
