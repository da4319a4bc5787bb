"""Which model a worker of vLLM serves: the digests that the reference engine computes too, so that the two may pair."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import xxhash

from isthmus_core.errors import ConfigError, StartError
from isthmus_worker.torch_engine.model_config import ModelUnusable, read_config
from isthmus_worker.vllm_engine.adapters import Adapter, read_adapters, with_adapters
from kvtransfer.errors import KVTransferError
from kvtransfer.integrations.checkpoint import weights_digest
from kvtransfer.integrations.vllm.fingerprint import DTYPES, settings_digest

if TYPE_CHECKING:
    from pathlib import Path

    from isthmus_core.config import IsthmusConfig

# vLLM's names of cache dtypes that are not those of torch.
_CACHE_DTYPES = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Digests over the weights and over what gives the bytes of a cache their meaning, and the LoRA adapters."""

    weights_digest: bytes
    attention_digest: bytes
    adapters: tuple[Adapter, ...] = ()

    def kv_dtype(self, cache: object, model: object) -> str:
        """As safetensors spells it; vLLM's names of the dtype of the cache ("auto": the model's) and of the model.
        Raises StartError for one without a name there."""
        name = str(model).removeprefix("torch.") if str(cache) == "auto" else str(cache)
        found = _CACHE_DTYPES.get(name) or DTYPES.get(name)
        if found is None:
            raise StartError(f"engine.vllm.kv_cache_dtype = {name}: is not known here")
        return found


def identify(config: IsthmusConfig) -> ModelIdentity:
    """Reads the whole checkpoint once. Raises ConfigError or StartError."""
    folder = config.model.path
    if folder is None:
        raise ConfigError("model.path is not set: engine.kind = vllm needs the folder of a model")
    attention, tied = _attention(folder)
    if (overrides := config.engine.vllm.get("hf_overrides")) is not None:
        attention = xxhash.xxh3_128_digest(attention + json.dumps(overrides, sort_keys=True, default=str).encode())
    adapters = read_adapters(config.engine.adapters)
    try:
        return ModelIdentity(weights_digest(folder, tied=tied), with_adapters(attention, adapters), adapters)
    except KVTransferError as error:
        raise StartError(str(error)) from error


def _attention(folder: Path) -> tuple[bytes, bool]:
    """(digest, tied embeddings): as the reference engine has it where it knows the architecture, else over the whole
    configuration of the model."""
    try:
        known = read_config(folder)
        return known.attention_digest(), known.tied
    except ModelUnusable:
        try:
            settings = cast("dict[str, Any]", json.loads((folder / "config.json").read_text()))
        except (OSError, ValueError) as error:
            raise StartError(f"{folder / 'config.json'}: {error}") from error
        return settings_digest(settings), bool(settings.get("tie_word_embeddings"))
