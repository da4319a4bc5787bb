"""Safetensors into the model's memory: one pass that checks, hashes and copies.

The digest is xxh3_128 over name, shape, dtype and bytes of every weight the model uses, in the order of the names: it
does not depend on how a checkpoint is cut into files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from isthmus_worker.torch_engine.model_config import ModelUnusable

if TYPE_CHECKING:
    from torch import Tensor

_DTYPES = ("F32", "BF16", "F16")
# Written by old exporters; computed from the configuration.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_weights(folder: Path, targets: Mapping[str, Tensor], tied: bool) -> bytes:
    """Copies every weight into its place in `targets` (name -> tensor of the shape the file must have).

    With `tied` embeddings an output matrix in the checkpoint is accepted if it equals the input matrix.
    Returns the digest. Raises ModelUnusable listing all missing, misshapen and unexpected tensors, or naming the file
    that can not be read.
    """
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in _weight_files(folder):
            found.update(_open(path, stack))
        _check(folder, found, targets, tied)
        digest = xxhash.xxh3_128()
        for name in sorted(targets):
            weight = _read(found[name], name)
            shape = ",".join(map(str, weight.shape))
            digest.update(f"{name}\0{shape}\0{weight.dtype}\0".encode())
            digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
            targets[name].copy_(weight)
        if tied and "lm_head.weight" in found:
            _check_tied(folder, found)
    return digest.digest()


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    try:
        content: Any = json.loads(index.read_text())
        weight_map = cast("dict[str, str]", content["weight_map"])
        return [folder / name for name in sorted(set(weight_map.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelUnusable(f"{index}: is not a safetensors index with a weight_map") from error


def _open(path: Path, stack: ExitStack) -> dict[str, Any]:
    """Open file of every tensor in `path`."""
    if not path.is_file():
        raise ModelUnusable(f"{path}: is missing; the folder needs model.safetensors, or an index and all its shards")
    try:
        file: Any = stack.enter_context(safe_open(str(path), framework="pt"))
        return dict.fromkeys(cast("list[str]", file.keys()), file)
    except (SafetensorError, OSError) as error:
        raise ModelUnusable(f"{path}: is not a readable safetensors file ({error}); fetch it again") from error


def _check(folder: Path, found: Mapping[str, Any], targets: Mapping[str, Tensor], tied: bool) -> None:
    problems: list[str] = []
    missing = sorted(set(targets) - set(found))
    if missing:
        problems.append(f"missing: {_some(missing)}")
    for name in sorted(set(targets) & set(found)):
        header = found[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
        if shape != tuple(targets[name].shape):
            problems.append(f"{name} has shape {shape}, config.json asks for {tuple(targets[name].shape)}")
        if dtype not in _DTYPES:
            problems.append(f"{name} has dtype {dtype}, supported are {', '.join(_DTYPES)}")
    known = {*targets, "lm_head.weight"} if tied else set(targets)
    unexpected = sorted(name for name in set(found) - known if not name.endswith(_IGNORED_SUFFIXES))
    if unexpected:
        problems.append(f"unexpected: {_some(unexpected)}")
    if problems:
        raise ModelUnusable(f"{folder}: weights do not fit config.json: {'; '.join(problems)}")


def _read(file: Any, name: str) -> Tensor:
    try:
        return cast("Tensor", file.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelUnusable(f"tensor {name} can not be read ({error}); fetch the model again") from error


def _check_tied(folder: Path, found: Mapping[str, Any]) -> None:
    embedding = _read(found["model.embed_tokens.weight"], "model.embed_tokens.weight")
    if not torch.equal(embedding, _read(found["lm_head.weight"], "lm_head.weight")):
        raise ModelUnusable(
            f"{folder}: tie_word_embeddings is true, but lm_head.weight differs from model.embed_tokens.weight; "
            "one of the two is wrong"
        )


def _some(names: list[str], limit: int = 20) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
