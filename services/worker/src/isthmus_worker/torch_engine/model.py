"""Llama: embedding, layers of attention and gated MLP, norm, output matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from isthmus_worker.torch_engine.attention import Attention
from isthmus_worker.torch_engine.layers import Linear, gated_silu, product, rope_tables, rotate_

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.kv_pool import KvPool
    from isthmus_worker.torch_engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Llama:
    """The weights and one step of computation. Memory is uninitialised until the tensors of `targets` are filled."""

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._device = device
        hidden = config.hidden_size
        self._embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self._layers = [_empty_layer(config, dtype, device) for _ in range(config.layers)]
        self._norm = torch.empty(hidden, dtype=dtype, device=device)
        self._head = self._embedding if config.tied else torch.empty_like(self._embedding)
        self._cos, self._sin = rope_tables(config.head_dim, config.rope_theta, max_model_len, dtype, device)

    def targets(self) -> dict[str, Tensor]:
        """Where each tensor of a checkpoint goes, by its name there. Fused weights appear as their parts."""
        config = self.config
        found = {"model.embed_tokens.weight": self._embedding, "model.norm.weight": self._norm}
        if not config.tied:
            found["lm_head.weight"] = self._head
        query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
        for index, layer in enumerate(self._layers):
            name = f"model.layers.{index}"
            found[f"{name}.input_layernorm.weight"] = layer.attention_norm
            found[f"{name}.post_attention_layernorm.weight"] = layer.mlp_norm
            for linear, parts in (
                (layer.qkv, {"self_attn.q_proj": query, "self_attn.k_proj": kv, "self_attn.v_proj": kv}),
                (layer.output, {"self_attn.o_proj": config.hidden_size}),
                (layer.gate_up, {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}),
                (layer.down, {"mlp.down_proj": config.hidden_size}),
            ):
                for kind, tensor in (("weight", linear.weight), ("bias", linear.bias)):
                    if tensor is not None:
                        pieces = tensor.split(list(parts.values()))
                        found.update(
                            {f"{name}.{part}.{kind}": piece for part, piece in zip(parts, pieces, strict=True)}
                        )
        return found

    def forward(self, plan: StepPlan, pool: KvPool) -> Tensor:
        """Runs the step and stores its K and V in `pool`. Returns logits [wanted rows, vocab_size]."""
        config, device = self.config, self._device
        attend = Attention(plan, pool)
        positions = torch.from_numpy(plan.positions).to(device)
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = functional.embedding(torch.from_numpy(plan.tokens).to(device), self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(plan.tokens), -1, config.head_dim)
            rotate_(qkv[:, : -config.kv_heads], cos, sin)
            hidden = layer.output.add_to(hidden, attend(index, qkv))
            hidden = layer.down.add_to(hidden, gated_silu(layer.gate_up(self._normed(hidden, layer.mlp_norm))))
        last = hidden if len(plan.last) == len(hidden) else hidden[torch.from_numpy(plan.last).to(device)]
        return product(self._normed(last, self._norm), self._head)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _empty_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.heads * config.head_dim
    kv_heads = config.kv_heads * config.head_dim
    return _Layer(
        attention_norm=torch.empty(hidden, dtype=dtype, device=device),
        qkv=Linear.empty(heads + 2 * kv_heads, hidden, config.attention_bias, dtype, device),
        output=Linear.empty(hidden, heads, config.attention_bias, dtype, device),
        mlp_norm=torch.empty(hidden, dtype=dtype, device=device),
        gate_up=Linear.empty(2 * inner, hidden, config.mlp_bias, dtype, device),
        down=Linear.empty(hidden, inner, config.mlp_bias, dtype, device),
    )
