"""LoRA adapters of a vLLM worker: read when it starts, named by requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import xxhash

from isthmus_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_SETTINGS, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# vLLM takes these as max_lora_rank, and no others.
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_PIECE = 1 << 24


@dataclass(frozen=True, slots=True)
class Adapter:
    """`number`: vLLM's id of it, from 1. `digest`: over settings and weights."""

    name: str
    path: Path
    number: int
    rank: int
    digest: bytes


def read_adapters(folders: Mapping[str, Path]) -> tuple[Adapter, ...]:
    """In order of their names. Raises ConfigError naming the key for a folder that is no adapter."""
    return tuple(_read(name, folders[name], number) for number, name in enumerate(sorted(folders), 1))


def adapter_arguments(adapters: Sequence[Adapter]) -> dict[str, Any]:
    """Of vLLM, where the configuration does not say otherwise."""
    if not adapters:
        return {}
    widest = max(one.rank for one in adapters)
    fits = next((rank for rank in _RANKS if rank >= widest), widest)
    return {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": fits}


def with_adapters(attention_digest: bytes, adapters: Sequence[Adapter]) -> bytes:
    """What gives a cache its meaning, with the adapters that may have computed it: instances pair if they are equal."""
    if not adapters:
        return attention_digest
    state = xxhash.xxh3_128(attention_digest)
    for one in adapters:
        name = one.name.encode()
        state.update(len(name).to_bytes(8, "little") + name + one.digest)
    return state.digest()


def _read(name: str, folder: Path, number: int) -> Adapter:
    key = f"engine.adapters.{name}"
    if not name:
        raise ConfigError("engine.adapters: an adapter has an empty name")
    state = xxhash.xxh3_128()
    try:
        text = (folder / _SETTINGS).read_bytes()
        rank = cast("dict[str, Any]", json.loads(text)).get("r")
        state.update(text)
        with (folder / _WEIGHTS).open("rb") as weights:
            while piece := weights.read(_PIECE):
                state.update(piece)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key} = {folder}: {error}; it must hold {_SETTINGS} and {_WEIGHTS}") from error
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"{key} = {folder}: r = {rank!r} in {_SETTINGS} is no rank")
    return Adapter(name, folder, number, rank, state.digest())
