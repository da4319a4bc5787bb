"""Which tensors a checkpoint must have, and which piece of each goes where in a rank's memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.model_config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """[begin, end) along dimension `dim` of a tensor goes into `target`."""

    target: Tensor
    dim: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Targets:
    """`shapes`: of every tensor of the model, by its name in a checkpoint. `parts`: what this rank takes of them."""

    shapes: dict[str, Shape]
    parts: dict[str, list[Part]] = field(default_factory=dict[str, list[Part]])

    def take(self, name: str, target: Tensor, dim: int = 0, begin: int = 0) -> None:
        """`target` is filled from `begin` on along `dim`; its other dimensions are the tensor's. Empty ones are left
        out."""
        if target.numel():
            self.parts.setdefault(name, []).append(Part(target, dim, begin, begin + target.shape[dim]))


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model and its shape. With `tied` embeddings there is no output matrix."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    embedding = (config.vocab_size, hidden)
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": embedding, "model.norm.weight": (hidden,)}
    if not config.tied:
        shapes["lm_head.weight"] = embedding
    linears = {
        "self_attn.q_proj": (query, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, query, config.output_bias),
        "mlp.gate_proj": (inner, hidden, config.mlp_bias),
        "mlp.up_proj": (inner, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, inner, config.mlp_bias),
    }
    for layer in range(config.layers):
        name = f"model.layers.{layer}"
        shapes[f"{name}.input_layernorm.weight"] = shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{name}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{name}.self_attn.k_norm.weight"] = (config.head_dim,)
        for linear, (out_size, in_size, bias) in linears.items():
            shapes[f"{name}.{linear}.weight"] = (out_size, in_size)
            if bias:
                shapes[f"{name}.{linear}.bias"] = (out_size,)
    return shapes
