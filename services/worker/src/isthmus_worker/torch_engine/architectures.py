"""Which checkpoints are computed: how each architecture's config.json maps on one decoder.

What the decoder does not compute is refused by name; nothing is ignored that would change a token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from isthmus_worker.torch_engine.model_config import ModelConfig
from isthmus_worker.torch_engine.rope import SCHEMES, Rope, yarn_scale

if TYPE_CHECKING:
    from isthmus_worker.torch_engine.model_config import Reader

Windows = tuple[int | None, ...]

_ROPE_FIELDS = {
    "rope_theta", "rope_type", "type", "partial_rotary_factor", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor",
    "truncate", "finetuned",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Biases:
    qkv: bool = False
    output: bool = False
    mlp: bool = False


@dataclass(frozen=True, slots=True)
class _Architecture:
    """`windows(reader, layers)`: what each layer sees."""

    biases: Callable[[Reader], _Biases]
    windows: Callable[[Reader, int], Windows]
    qk_norm: bool = False


def parse(reader: Reader) -> ModelConfig | None:
    """The decoder that config.json describes. Without problems in `reader` the result is complete and consistent."""
    names: Any = reader.raw.get("architectures")
    name = str(cast("list[Any]", names)[0]) if isinstance(names, list) and len(cast("list[Any]", names)) == 1 else ""
    architecture = _ARCHITECTURES.get(name)
    if architecture is None:
        known = " or ".join(json.dumps([one]) for one in _ARCHITECTURES)
        reader.problem("architectures", f"= {json.dumps(names)} is not supported, only {known}")
    _refuse(reader)
    hidden = reader.number("hidden_size", int)
    layers = reader.number("num_hidden_layers", int)
    heads = reader.number("num_attention_heads", int)
    kv_heads = reader.number("num_key_value_heads", int, heads)
    head_dim = reader.number("head_dim", int, max(hidden // heads, 1))
    if heads % kv_heads:
        reader.problem("num_attention_heads", f"= {heads}: must be a multiple of num_key_value_heads = {kv_heads}")
    if head_dim % 2:
        reader.problem("head_dim", f"= {head_dim}: must be even")
    max_position = reader.number("max_position_embeddings", int)
    biases = architecture.biases(reader) if architecture else _Biases()
    return ModelConfig(
        architecture=name,
        vocab_size=reader.number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=reader.number("intermediate_size", int),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        rms_norm_eps=reader.number("rms_norm_eps", float),
        rope=_rope(reader, max_position),
        windows=architecture.windows(reader, layers) if architecture else (None,) * layers,
        tied=reader.number("tie_word_embeddings", bool, False),
        qkv_bias=biases.qkv,
        output_bias=biases.output,
        mlp_bias=biases.mlp,
        qk_norm=architecture is not None and architecture.qk_norm,
        dtype=_dtype(reader),
    )


def _refuse(reader: Reader) -> None:
    """Features of checkpoints with a known architecture that would change tokens."""
    reader.only("hidden_act", ("silu", None))
    reader.only("quantization_config", (None,))
    reader.only("partial_rotary_factor", (None, 1.0))
    for name in ("num_experts", "num_local_experts", "moe_intermediate_size"):
        reader.only(name, (None,))


def _dtype(reader: Reader) -> str:
    name = "dtype" if "dtype" in reader.raw else "torch_dtype"
    value: Any = reader.raw.get(name)
    if value not in ("float32", "bfloat16", "float16", None):
        reader.problem(name, f"= {json.dumps(value)} is not supported, only float32, bfloat16 or float16")
    return "float32" if value is None else str(value)


# --- rotary embedding


def _rope(reader: Reader, max_position: int) -> Rope:
    """Both spellings: rope_parameters {rope_theta, rope_type}, and rope_theta beside rope_scaling of older files."""
    theta = reader.number("rope_theta", float, 10000.0)
    section = reader.section("rope_scaling" if reader.raw.get("rope_scaling") else "rope_parameters")
    if section is None:
        return Rope(theta)
    for name in sorted(set(section.raw) - _ROPE_FIELDS):
        section.problem(name, "is not supported")
    theta = section.number("rope_theta", float, theta)
    section.only("partial_rotary_factor", (None, 1.0))
    key = "rope_type" if "rope_type" in section.raw else "type"
    section.only(key, (None, *SCHEMES))
    scheme: Any = section.raw.get(key)
    context = reader.number(
        "original_max_position_embeddings", int,
        section.number("original_max_position_embeddings", int, max_position),
    )  # fmt: skip
    if scheme == "linear":
        return Rope(theta, "linear", factor=section.number("factor", float))
    if scheme == "llama3":
        return _llama3(section, theta, context)
    if scheme == "yarn":
        return _yarn(section, theta, context, max_position)
    return Rope(theta)


def _llama3(section: Reader, theta: float, context: int) -> Rope:
    low, high = section.number("low_freq_factor", float), section.number("high_freq_factor", float)
    if high <= low:
        section.problem("high_freq_factor", f"= {high}: must be above low_freq_factor = {low}")
    return Rope(theta, "llama3", section.number("factor", float), context, low, high)


def _yarn(section: Reader, theta: float, context: int, max_position: int) -> Rope:
    factor = section.number("factor", float, max_position / context)
    if theta <= 1:
        section.problem("rope_theta", f"= {theta}: must be above 1 for yarn")
    mscale: Any = section.raw.get("mscale")
    all_dim: Any = section.raw.get("mscale_all_dim")
    scale = yarn_scale(factor)
    if mscale and all_dim:
        mscale, all_dim = section.number("mscale", float), section.number("mscale_all_dim", float)
        scale = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    return Rope(
        theta,
        "yarn",
        factor,
        context,
        low=section.number("beta_slow", float, 1.0),
        high=section.number("beta_fast", float, 32.0),
        truncate=section.number("truncate", bool, True),
        scale=section.number("attention_factor", float, scale),
    )


# --- what layers see


def _no_window(reader: Reader, layers: int) -> Windows:
    reader.only("sliding_window", (None,))
    reader.only("layer_types", (None, ["full_attention"] * layers))
    return (None,) * layers


def _one_window(reader: Reader, layers: int) -> Windows:
    """All layers alike. The window of a file that does not mention one is that of the first Mistral model."""
    reader.only("layer_types", (None,))
    if "sliding_window" in reader.raw and reader.raw["sliding_window"] is None:
        return (None,) * layers
    return (reader.number("sliding_window", int, 4096),) * layers


def _window_by_layer(reader: Reader, layers: int) -> Windows:
    """Layers from `max_window_layers` on, or those that `layer_types` names; none without `use_sliding_window`."""
    window: int | None = None
    if reader.number("use_sliding_window", bool, False) and reader.raw.get("sliding_window", 4096) is not None:
        window = reader.number("sliding_window", int, 4096)
    types: Any = reader.raw.get("layer_types")
    if types is None:
        first: Any = reader.raw.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            reader.problem("max_window_layers", f"= {json.dumps(first)}: must be a whole number")
            first = 0
        return tuple(window if layer >= first else None for layer in range(layers))
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or any(one not in known for one in cast("list[Any]", types)):
        reader.problem("layer_types", f"= {json.dumps(types)}: must be a list of {' or '.join(known)}")
        return (None,) * layers
    named = cast("list[str]", types)
    if len(named) != layers:
        reader.problem("layer_types", f"names {len(named)} layers of num_hidden_layers = {layers}")
        return (None,) * layers
    if window is None and "sliding_attention" in named:
        reader.problem("layer_types", "asks for sliding_attention, but use_sliding_window and sliding_window do not")
    return tuple(known[one] for one in named)


# --- biases and the registry


def _llama_biases(reader: Reader) -> _Biases:
    attention = reader.number("attention_bias", bool, False)
    return _Biases(attention, attention, reader.number("mlp_bias", bool, False))


def _qwen2_biases(reader: Reader) -> _Biases:
    return _Biases(qkv=True)


def _qwen3_biases(reader: Reader) -> _Biases:
    attention = reader.number("attention_bias", bool, False)
    return _Biases(attention, attention)


def _no_biases(reader: Reader) -> _Biases:
    return _Biases()


_ARCHITECTURES = {
    "LlamaForCausalLM": _Architecture(_llama_biases, _no_window),
    "MistralForCausalLM": _Architecture(_no_biases, _one_window),
    "Qwen2ForCausalLM": _Architecture(_qwen2_biases, _window_by_layer),
    "Qwen3ForCausalLM": _Architecture(_qwen3_biases, _window_by_layer, qk_norm=True),
}
