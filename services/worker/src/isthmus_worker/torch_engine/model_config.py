"""A decoder as a frozen value, and the reading of config.json into it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc
import xxhash

from isthmus_core.errors import IsthmusError

if TYPE_CHECKING:
    from isthmus_worker.torch_engine.rope import Rope

_T = TypeVar("_T", int, float, bool)


class ModelUnusable(IsthmusError):
    """The checkpoint can not be served: its files are wrong, or it needs something this engine does not compute."""

    code = grpc.StatusCode.FAILED_PRECONDITION


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants of a decoder. `dtype` is the checkpoint's own spelling ("float32", "bfloat16", "float16").

    `windows` has one entry per layer: how many positions a token sees, its own included; None = all before it.
    `qk_norm`: query and key heads are normalised before the rotation.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    windows: tuple[int | None, ...]
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str

    def attention_digest(self) -> bytes:
        """xxh3_128 over everything that gives the bytes of a KV cache their meaning, apart from the weights."""
        names = ("layers", "heads", "kv_heads", "head_dim", "rms_norm_eps", "windows", "qk_norm", "qkv_bias")
        text = json.dumps(
            {"rope": asdict(self.rope), **{name: getattr(self, name) for name in names}},
            sort_keys=True,
        )
        return xxhash.xxh3_128_digest(text.encode())


def read_config(folder: Path) -> ModelConfig:
    """Reads `folder`/config.json. Raises ModelUnusable with every problem in it."""
    from isthmus_worker.torch_engine.architectures import parse

    path = folder / "config.json"
    try:
        raw: Any = json.loads(path.read_text())
    except OSError as error:
        raise ModelUnusable(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelUnusable(f"{path}: is not JSON ({error})") from error
    if not isinstance(raw, dict):
        raise ModelUnusable(f"{path}: must hold an object, not {type(raw).__name__}")
    reader = Reader(cast("dict[str, Any]", raw))
    config = parse(reader)
    if config is None or reader.problems:
        raise ModelUnusable(f"{path}: {'; '.join(reader.problems)}")
    return config


class Reader:
    """Typed look-ups in a JSON object that collect problems instead of stopping at the first."""

    def __init__(self, raw: dict[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.raw = raw
        self._prefix = prefix
        self.problems: list[str] = [] if problems is None else problems

    def problem(self, name: str, text: str) -> None:
        """Notes that the field `name` is wrong; `text` begins with its value or "is"."""
        self.problems.append(f"{self._prefix}{name} {text}")

    def number(self, name: str, kind: type[_T], default: _T | None = None) -> _T:
        """A finite number above 0 (or a bool). A stand-in is returned with a problem noted."""
        value: Any = self.raw.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.problem(name, "is missing")
        elif kind is float and type(value) is int and value > 0:
            return kind(value)
        elif type(value) is kind and (kind is bool or 0 < value < float("inf")):
            return cast("_T", value)
        else:
            wanted = "true or false" if kind is bool else "a whole number" if kind is int else "a number"
            self.problem(name, f"= {value!r}: must be {wanted}{'' if kind is bool else ' above 0'}")
        return kind(1)

    def only(self, name: str, accepted: tuple[object, ...]) -> None:
        """Refuses any value that is not one of `accepted`; absent reads as None."""
        value: Any = self.raw.get(name)
        if value not in accepted:
            shown = " or ".join(json.dumps(one) for one in accepted)
            self.problem(name, f"= {json.dumps(value)} is not supported, only {shown}")

    def section(self, name: str) -> Reader | None:
        """The object under `name`, sharing this reader's problems; None when absent or null."""
        value: Any = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problem(name, f"= {json.dumps(value)}: must be an object or null")
            return None
        return Reader(cast("dict[str, Any]", value), f"{self._prefix}{name}.", self.problems)
