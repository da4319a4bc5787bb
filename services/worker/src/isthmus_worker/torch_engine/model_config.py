"""config.json of a Llama checkpoint as a frozen value. What the model code does not compute is refused by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import xxhash

from isthmus_core.errors import IsthmusError

_T = TypeVar("_T", int, float, bool)


class ModelUnusable(IsthmusError):
    """The checkpoint can not be served: its files are wrong, or it needs something this engine does not compute."""

    code = grpc.StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model. `dtype` is the checkpoint's own spelling ("float32", "bfloat16", "float16")."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str

    def attention_digest(self) -> bytes:
        """xxh3_128 over everything that gives the bytes of a KV cache their meaning, apart from the weights."""
        names = ("layers", "heads", "kv_heads", "head_dim", "rope_theta", "rms_norm_eps")
        text = json.dumps({"rope": "default", **{name: getattr(self, name) for name in names}}, sort_keys=True)
        return xxhash.xxh3_128_digest(text.encode())


def read_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises ModelUnusable with every problem in it."""
    path = folder / "config.json"
    try:
        raw: Any = json.loads(path.read_text())
    except OSError as error:
        raise ModelUnusable(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelUnusable(f"{path}: is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelUnusable(f"{path}: must hold an object, not {type(raw).__name__}")
    reader = _Reader(cast("dict[str, Any]", raw))
    config = _parse(reader)
    if reader.problems:
        raise ModelUnusable(f"{path}: {'; '.join(reader.problems)}")
    return config


class _Reader:
    """Typed look-ups that collect problems instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        self.problems: list[str] = []

    def number(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """A number above 0 (or a bool). A stand-in is returned with a problem noted."""
        value: Any = self.raw.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problems.append(f"{name} is missing")
        elif kind is float and type(value) is int and value > 0:
            return kind(value)
        elif type(value) is kind and (kind is bool or value > 0):
            return cast("_T", value)
        else:
            self.problems.append(
                f"{name} = {value!r}: must be {'true or false' if kind is bool else 'a number above 0'}"
            )
        return kind(1)

    def only(self, name: str, accepted: tuple[object, ...]) -> None:
        """Refuses any value that is not one of `accepted`; absent reads as None."""
        value: Any = self.raw.get(name)
        if value not in accepted:
            shown = " or ".join(json.dumps(one) for one in accepted)
            self.problems.append(f"{name} = {json.dumps(value)} is not supported, only {shown}")


def _parse(reader: _Reader) -> ModelConfig:
    reader.only("architectures", (["LlamaForCausalLM"],))
    reader.only("hidden_act", ("silu", None))
    reader.only("quantization_config", (None,))
    reader.only("sliding_window", (None,))
    reader.only("partial_rotary_factor", (None, 1.0))
    hidden = reader.number("hidden_size", int)
    heads = reader.number("num_attention_heads", int)
    kv_heads = reader.number("num_key_value_heads", int, heads)
    head_dim = reader.number("head_dim", int, max(hidden // heads, 1))
    if heads % kv_heads:
        reader.problems.append(f"num_attention_heads = {heads}: must be a multiple of num_key_value_heads = {kv_heads}")
    if head_dim % 2:
        reader.problems.append(f"head_dim = {head_dim}: must be even")
    return ModelConfig(
        vocab_size=reader.number("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=reader.number("intermediate_size", int),
        layers=reader.number("num_hidden_layers", int),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=reader.number("max_position_embeddings", int),
        rms_norm_eps=reader.number("rms_norm_eps", float),
        rope_theta=_rope_theta(reader),
        tied=reader.number("tie_word_embeddings", bool, False),
        attention_bias=reader.number("attention_bias", bool, False),
        mlp_bias=reader.number("mlp_bias", bool, False),
        dtype=_dtype(reader),
    )


def _rope_theta(reader: _Reader) -> float:
    """Both spellings: rope_parameters {rope_theta, rope_type}, and rope_theta beside rope_scaling of older files."""
    theta = reader.number("rope_theta", float, 10000.0)
    for name in ("rope_parameters", "rope_scaling"):
        rope: Any = reader.raw.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            reader.problems.append(f"{name} = {json.dumps(rope)}: must be an object or null")
            continue
        section = _Reader(cast("dict[str, Any]", rope))
        theta = section.number("rope_theta", float, theta)
        section.only("partial_rotary_factor", (None, 1.0))
        section.only("rope_type", (None, "default"))
        section.only("type", (None, "default"))
        reader.problems += [f"{name}.{problem}" for problem in section.problems]
    return theta


def _dtype(reader: _Reader) -> str:
    name = "dtype" if "dtype" in reader.raw else "torch_dtype"
    value: Any = reader.raw.get(name)
    if value not in ("float32", "bfloat16", "float16", None):
        reader.problems.append(f"{name} = {json.dumps(value)} is not supported, only float32, bfloat16 or float16")
    return "float32" if value is None else str(value)
