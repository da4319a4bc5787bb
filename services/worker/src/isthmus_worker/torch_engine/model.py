"""The decoder: embedding, layers of attention and gated MLP, norm, output matrix."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from isthmus_worker.torch_engine.layers import Linear, gated_silu, pack, product
from isthmus_worker.torch_engine.rope import rotate_

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.attention import AttentionStep
    from isthmus_worker.torch_engine.batch import StepPlan
    from isthmus_worker.torch_engine.model_config import ModelConfig


# The packed copy of the weights is for models up to this size: larger ones need their memory for other things.
MAX_PACKED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None  # [head_dim], as key_norm
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    def matrices(self) -> tuple[Linear, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def packed(self) -> _Layer:
        qkv, output, gate_up, down = (one.with_packed() for one in self.matrices())
        return replace(self, qkv=qkv, output=output, gate_up=gate_up, down=down)


class Decoder:
    """The weights and one step of computation. Memory is uninitialised until the tensors of `targets` are filled."""

    def __init__(self, config: ModelConfig, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self._device = device
        hidden = config.hidden_size
        self._embedding = torch.empty(config.vocab_size, hidden, dtype=dtype, device=device)
        self._layers = [_empty_layer(config, dtype, device) for _ in range(config.layers)]
        self._norm = torch.empty(hidden, dtype=dtype, device=device)
        self._head = self._embedding if config.tied else torch.empty_like(self._embedding)
        self._cos, self._sin = config.rope.tables(config.head_dim, max_model_len, dtype, device)
        self._packed_head: Tensor | None = None

    def pack(self) -> bool:
        """Call once the weights are loaded. Float32 models on the CPU get a packed copy of their matrices, which makes
        batches faster, unless that needs more than MAX_PACKED_BYTES. Returns whether they have."""
        matrices = [self._head, *(one.weight for layer in self._layers for one in layer.matrices())]
        if sum(one.nbytes for one in matrices) > MAX_PACKED_BYTES:
            return False
        self._packed_head = pack(self._head)
        self._layers = [layer.packed() for layer in self._layers]
        return self._packed_head is not None

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
            if layer.query_norm is not None and layer.key_norm is not None:
                found[f"{name}.self_attn.q_norm.weight"] = layer.query_norm
                found[f"{name}.self_attn.k_norm.weight"] = layer.key_norm
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

    def forward(self, plan: StepPlan, attend: AttentionStep) -> Tensor:
        """Runs the step; `attend` stores its K and V. Returns logits [wanted rows, vocab_size]."""
        config, device = self.config, self._device
        positions = torch.from_numpy(plan.positions).to(device)
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = functional.embedding(torch.from_numpy(plan.tokens).to(device), self._embedding)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(plan.tokens), -1, config.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                self._normalise_(qkv[:, : config.heads], layer.query_norm)
                self._normalise_(qkv[:, config.heads : -config.kv_heads], layer.key_norm)
            rotate_(qkv[:, : -config.kv_heads], cos, sin)
            hidden = layer.output.add_to(hidden, attend(index, qkv))
            hidden = layer.down.add_to(hidden, gated_silu(layer.gate_up(self._normed(hidden, layer.mlp_norm))))
        last = hidden if len(plan.last) == len(hidden) else hidden[torch.from_numpy(plan.last).to(device)]
        return product(self._normed(last, self._norm), self._head, self._packed_head)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _normalise_(self, x: Tensor, weight: Tensor) -> None:
        x.copy_(self._normed(x, weight))


def _empty_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> _Layer:
    hidden, inner = config.hidden_size, config.intermediate_size
    heads = config.heads * config.head_dim
    kv_heads = config.kv_heads * config.head_dim
    return _Layer(
        attention_norm=torch.empty(hidden, dtype=dtype, device=device),
        qkv=Linear.empty(heads + 2 * kv_heads, hidden, config.qkv_bias, dtype, device),
        query_norm=torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None,
        key_norm=torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None,
        output=Linear.empty(hidden, heads, config.output_bias, dtype, device),
        mlp_norm=torch.empty(hidden, dtype=dtype, device=device),
        gate_up=Linear.empty(2 * inner, hidden, config.mlp_bias, dtype, device),
        down=Linear.empty(hidden, inner, config.mlp_bias, dtype, device),
    )
