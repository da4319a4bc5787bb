"""The model that a vLLM instance serves, as peers compare it. Takes vLLM's configuration as it is, imports nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import xxhash

from kvtransfer.errors import KVTransferError
from kvtransfer.integrations.checkpoint import weights_digest
from kvtransfer.rank_info import ModelFingerprint

if TYPE_CHECKING:
    from collections.abc import Mapping

# As safetensors spells them.
DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
}  # fmt: skip
# Fields of a model's configuration that say nothing about the bytes of its cache.
_IRRELEVANT = frozenset({"_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures"})


def kv_dtype(spec: Any) -> str:
    """Of a cache specification, as safetensors spells it. Raises KVTransferError for one without a name there."""
    name = str(spec.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise KVTransferError(f"KV dtype {name} is not known; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def fingerprint(config: Any, spec: Any, digests: Mapping[str, str] | None) -> ModelFingerprint:
    """`config`: vLLM's VllmConfig, `spec`: of a cache group. `digests`: {"weights": HEX, "attention": HEX} from
    whoever knows them already; without it they are computed here. Raises KVTransferError."""
    model = config.model_config
    mode = str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")).lower()
    quantization = "" if mode == "none" else mode
    if digests is not None:
        weights, attention = (bytes.fromhex(digests[name]) for name in ("weights", "attention"))
        return ModelFingerprint(weights, attention, kv_dtype(spec), quantization)
    settings = cast("dict[str, Any]", model.hf_text_config.to_dict())
    tied = bool(settings.get("tie_word_embeddings"))
    weights = weights_digest(_folder(str(model.model), model.revision), tied=tied)
    return ModelFingerprint(weights, settings_digest(settings), kv_dtype(spec), quantization)


def settings_digest(settings: Mapping[str, Any]) -> bytes:
    """xxh3_128 over a model's configuration without what does not matter for its cache."""
    kept = {name: value for name, value in settings.items() if name not in _IRRELEVANT}
    return xxhash.xxh3_128_digest(json.dumps(kept, sort_keys=True, default=str).encode())


def _folder(model: str, revision: str | None) -> Path:
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]

        return Path(str(snapshot_download(model, revision=revision, local_files_only=True)))
    except (ImportError, OSError, ValueError) as error:
        raise KVTransferError(f"model {model}: neither a folder nor in the local hub cache ({error})") from error
