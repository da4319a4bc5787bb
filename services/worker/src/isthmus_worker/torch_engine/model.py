"""The decoder: embedding, layers of attention and gated MLP, norm, output matrix. One rank's part of it.

    stage 0       embedding ▶ its layers ─┐ hidden states            every layer: two sums over the ranks of the stage
    stage 1                               └▶ its layers ▶ norm ▶ output matrix ▶ logits, to rank 0

With attention data parallelism every rank has the hidden states of the tokens of all groups and computes attention for
those of its own group only: the sum after attention brings the groups together, and costs what it costs without them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from isthmus_core.config_parallel import ParallelConfig
from isthmus_worker.parallel.shard import Shard, shard_of
from isthmus_worker.torch_engine.collectives import Alone, Collectives
from isthmus_worker.torch_engine.layers import Linear, gated_silu, pack, product
from isthmus_worker.torch_engine.rope import rotate_
from isthmus_worker.torch_engine.weights import Targets, weight_shapes

if TYPE_CHECKING:
    from torch import Tensor

    from isthmus_worker.torch_engine.attention import AttentionStep
    from isthmus_worker.torch_engine.joint_step import JointStep
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
    """The weights and one step of computation. Memory is uninitialised until the tensors of `targets` are filled.

    `shard`: what this rank holds; the whole model when absent. `collectives` may be set later, before the first step.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard | None = None,
    ) -> None:
        self.config = config
        self.shard = shard or shard_of(config, ParallelConfig(), 0)
        self.collectives: Collectives = Alone()
        # Called with the index of each layer of this rank when the kernels that write its K and V are launched.
        self.on_layer: Callable[[int], None] | None = None
        self._dtype, self._device = dtype, device
        first, last = self.shard.is_first, self.shard.is_last
        begin, end = self.shard.vocab
        # A rank that has both ends of a tied model has one matrix for them.
        rows = torch.empty(end - begin, config.hidden_size, dtype=dtype, device=device)
        self._embedding = rows if first else None
        self._norm = torch.empty(config.hidden_size, dtype=dtype, device=device) if last else None
        self._head = (rows if config.tied or not first else torch.empty_like(rows)) if last else None
        self._layers = [_empty_layer(config, self.shard, dtype, device) for _ in self.shard.layers]
        self._cos, self._sin = config.rope.tables(config.head_dim, max_model_len, dtype, device)
        self._packed_head: Tensor | None = None

    def pack(self) -> bool:
        """Call once the weights are loaded. Float32 models on the CPU get a packed copy of their matrices, which makes
        batches faster, unless that needs more than MAX_PACKED_BYTES. Returns whether they have."""
        matrices = [one.weight for layer in self._layers for one in layer.matrices()]
        heads = [] if self._head is None else [self._head]
        if sum(one.nbytes for one in (*matrices, *heads)) > MAX_PACKED_BYTES:
            return False
        self._packed_head = None if self._head is None else pack(self._head)
        self._layers = [layer.packed() for layer in self._layers]
        return any(one.packed is not None for one in self._layers[0].matrices())

    def targets(self) -> Targets:
        """Where each tensor of a checkpoint goes, by its name there. Fused weights appear as their parts."""
        found = Targets(weight_shapes(self.config))
        begin = self.shard.vocab[0]
        if self._embedding is not None:
            found.take("model.embed_tokens.weight", self._embedding, 0, begin)
        if self._norm is not None:
            found.take("model.norm.weight", self._norm)
        if self._head is not None and self._head is not self._embedding:
            found.take("model.embed_tokens.weight" if self.config.tied else "lm_head.weight", self._head, 0, begin)
        for layer, held in zip(self.shard.layers, self._layers, strict=True):
            self._take_layer(found, f"model.layers.{layer}", held)
        return found

    def _take_layer(self, found: Targets, name: str, layer: _Layer) -> None:
        shard, dim = self.shard.heads, self.config.head_dim
        found.take(f"{name}.input_layernorm.weight", layer.attention_norm)
        found.take(f"{name}.post_attention_layernorm.weight", layer.mlp_norm)
        if layer.query_norm is not None and layer.key_norm is not None:
            found.take(f"{name}.self_attn.q_norm.weight", layer.query_norm)
            found.take(f"{name}.self_attn.k_norm.weight", layer.key_norm)
        keys, values = shard.heads * dim, (shard.heads + shard.kv_heads) * dim
        inner, (begin, end) = layer.down.weight.shape[1], self.shard.inner
        for kind in ("weight", "bias"):
            qkv, gate_up = getattr(layer.qkv, kind), getattr(layer.gate_up, kind)
            if qkv is not None:
                for place, (low, high) in enumerate(shard.queries):
                    at = place * shard.group * dim
                    found.take(f"{name}.self_attn.q_proj.{kind}", qkv[at : at + (high - low) * dim], 0, low * dim)
                found.take(f"{name}.self_attn.k_proj.{kind}", qkv[keys:values], 0, shard.kv[0] * dim)
                found.take(f"{name}.self_attn.v_proj.{kind}", qkv[values:], 0, shard.kv[0] * dim)
            if gate_up is not None:
                found.take(f"{name}.mlp.gate_proj.{kind}", gate_up[:inner], 0, begin)
                found.take(f"{name}.mlp.up_proj.{kind}", gate_up[inner:], 0, begin)
        for place, (low, high) in enumerate(shard.queries):
            at = place * shard.group * dim
            columns = layer.output.weight[:, at : at + (high - low) * dim]
            found.take(f"{name}.self_attn.o_proj.weight", columns, 1, low * dim)
        found.take(f"{name}.mlp.down_proj.weight", layer.down.weight[:, : end - begin], 1, begin)
        for part, linear in (("self_attn.o_proj", layer.output), ("mlp.down_proj", layer.down)):
            if linear.bias is not None:
                found.take(f"{name}.{part}.bias", linear.bias)

    def forward(self, step: JointStep, attend: AttentionStep | None) -> Tensor | None:
        """Runs the step; `attend` stores its K and V, None when this rank's group has no row in it. Returns logits
        [wanted rows, vocab_size] on rank 0, None elsewhere and when none are wanted."""
        hidden = self._enter(step)
        own = step.own
        positions = torch.from_numpy(step.positions).to(self._device)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self._layers):
            heads = None
            if attend is not None:
                heads = attend(index, self._queries_keys_values(layer, hidden[own], cos, sin))
            if self.on_layer is not None:
                self.on_layer(index)
            hidden = self._add(hidden, layer.output, heads, own)
            inner = gated_silu(layer.gate_up(self._normed(hidden, layer.mlp_norm)))
            hidden = self._add(hidden, layer.down, inner, slice(None))
        if self._norm is None:
            self.collectives.send_on(hidden)
            return self.collectives.to_leader(None, len(step.last)) if len(step.last) else None
        return self._logits(hidden, self._norm, step)

    def _enter(self, step: JointStep) -> Tensor:
        """Hidden states of all tokens before the first layer of this stage, [N, hidden_size]."""
        if self._embedding is None:
            size = len(step.tokens), self.config.hidden_size
            return self.collectives.receive(torch.empty(size, dtype=self._dtype, device=self._device))
        tokens = torch.from_numpy(step.tokens).to(self._device)
        begin, end = self.shard.vocab
        if end - begin == self.config.vocab_size:
            return functional.embedding(tokens, self._embedding)
        elsewhere = (tokens < begin) | (tokens >= end)
        hidden = functional.embedding((tokens - begin).masked_fill_(elsewhere, 0), self._embedding)
        return self.collectives.sum_(hidden.masked_fill_(elsewhere[:, None], 0))

    def _queries_keys_values(self, layer: _Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[own tokens, heads + 2 * kv_heads, head_dim], rotated."""
        heads, kv_heads = self.shard.heads.heads, self.shard.heads.kv_heads
        qkv = layer.qkv(self._normed(hidden, layer.attention_norm)).view(len(hidden), -1, self.config.head_dim)
        if layer.query_norm is not None and layer.key_norm is not None:
            self._normalise_(qkv[:, :heads], layer.query_norm)
            self._normalise_(qkv[:, heads:-kv_heads], layer.key_norm)
        rotate_(qkv[:, :-kv_heads], cos, sin)
        return qkv

    def _add(self, hidden: Tensor, linear: Linear, x: Tensor | None, rows: slice) -> Tensor:
        """hidden + linear(x) over all ranks of the stage; x are the `rows` of this rank."""
        topology = self.shard.topology
        if topology.tp_size == 1 and x is not None:
            return linear.add_to(hidden, x)
        y = None if x is None else linear.multiply(x)
        if topology.dp_size > 1 and rows != slice(None):
            everybody = torch.zeros_like(hidden)
            if y is not None:
                everybody[rows] = y
            y = everybody
        if y is None:
            y = torch.zeros_like(hidden)
        y = self.collectives.sum_(y)
        return hidden + (y if linear.bias is None else y.add_(linear.bias))

    def _logits(self, hidden: Tensor, norm: Tensor, step: JointStep) -> Tensor | None:
        wanted = len(step.last)
        if not wanted or self._head is None:
            return None
        last = hidden if wanted == len(hidden) else hidden[torch.from_numpy(step.last).to(self._device)]
        logits = product(self._normed(last, norm), self._head, self._packed_head)
        columns = -(-self.config.vocab_size // self.shard.topology.tp_size)
        if logits.shape[1] < columns:
            logits = functional.pad(logits, (0, columns - logits.shape[1]))
        found = self.collectives.to_leader(logits, wanted)
        return None if found is None else found[:, : self.config.vocab_size]

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _normalise_(self, x: Tensor, weight: Tensor) -> None:
        x.copy_(self._normed(x, weight))


def _empty_layer(config: ModelConfig, shard: Shard, dtype: torch.dtype, device: torch.device) -> _Layer:
    hidden, inner = config.hidden_size, shard.inner[1] - shard.inner[0]
    heads, kv_heads = shard.heads.heads * config.head_dim, shard.heads.kv_heads * config.head_dim
    layer = _Layer(
        attention_norm=torch.empty(hidden, dtype=dtype, device=device),
        qkv=Linear.empty(heads + 2 * kv_heads, hidden, config.qkv_bias, dtype, device),
        query_norm=torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None,
        key_norm=torch.empty(config.head_dim, dtype=dtype, device=device) if config.qk_norm else None,
        output=Linear.empty(hidden, heads, config.output_bias, dtype, device),
        mlp_norm=torch.empty(hidden, dtype=dtype, device=device),
        gate_up=Linear.empty(2 * inner, hidden, config.mlp_bias, dtype, device),
        down=Linear.empty(hidden, inner, config.mlp_bias, dtype, device),
    )
    if any(end - begin < shard.heads.group for begin, end in shard.heads.queries):
        # Zero heads fill the places that no query head of this rank takes.
        for memory in (layer.qkv.weight, layer.qkv.bias, layer.output.weight):
            if memory is not None:
                memory.zero_()
    return layer
