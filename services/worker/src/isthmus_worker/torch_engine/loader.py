"""Safetensors into the model's memory: one pass that checks, hashes and copies.

The digest of a model is xxh3_128 over name and digest of every tensor it uses, in the order of the names; that of a
tensor is over shape, dtype and bytes. Neither depends on how a checkpoint is cut into files. The ranks of an instance
share the hashing: each reads what it holds, and some tensors whole.
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

    from isthmus_worker.torch_engine.weights import Part, Shape, Targets

_DTYPES = ("F32", "BF16", "F16")
# Written by old exporters; computed from the configuration.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_weights(folder: Path, targets: Targets, tied: bool, rank: int = 0, ranks: int = 1) -> dict[str, bytes]:
    """Copies every part that `targets` takes into its place.

    With `tied` embeddings an output matrix in the checkpoint is accepted if it equals the input matrix.
    Returns the digests of every `ranks`-th tensor, those of this `rank`. Raises ModelUnusable listing all missing,
    misshapen and unexpected tensors of the whole model, or naming the file that can not be read.
    """
    digests: dict[str, bytes] = {}
    with ExitStack() as stack:
        found: dict[str, Any] = {}
        for path in _weight_files(folder):
            found.update(_open(path, stack))
        _check(folder, found, targets.shapes, tied)
        for index, name in enumerate(sorted(targets.shapes)):
            parts = targets.parts.get(name, [])
            if index % ranks == rank:
                weight = _read(found[name], name)
                digests[name] = _digest(weight)
                for part in parts:
                    part.target.copy_(weight.narrow(part.dim, part.begin, part.end - part.begin))
            else:
                for part in parts:
                    part.target.copy_(_read_part(found[name], name, part))
        if tied and "lm_head.weight" in found and rank == 0:
            _check_tied(folder, found)
    return digests


def model_digest(digests: Mapping[str, bytes]) -> bytes:
    """The digest of a model from those of all its tensors."""
    digest = xxhash.xxh3_128()
    for name in sorted(digests):
        digest.update(name.encode() + b"\0" + digests[name])
    return digest.digest()


def _digest(weight: Tensor) -> bytes:
    digest = xxhash.xxh3_128(f"{','.join(map(str, weight.shape))}\0{weight.dtype}\0".encode())
    digest.update(weight.contiguous().view(-1).view(torch.uint8).numpy().data)
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


def _check(folder: Path, found: Mapping[str, Any], shapes: Mapping[str, Shape], tied: bool) -> None:
    problems: list[str] = []
    missing = sorted(set(shapes) - set(found))
    if missing:
        problems.append(f"missing: {_some(missing)}")
    for name in sorted(set(shapes) & set(found)):
        header = found[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), str(header.get_dtype())
        if shape != shapes[name]:
            problems.append(f"{name} has shape {shape}, config.json asks for {shapes[name]}")
        if dtype not in _DTYPES:
            problems.append(f"{name} has dtype {dtype}, supported are {', '.join(_DTYPES)}")
    known = {*shapes, "lm_head.weight"} if tied else set(shapes)
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


def _read_part(file: Any, name: str, part: Part) -> Tensor:
    try:
        whole = file.get_slice(name)
        piece = slice(part.begin, part.end)
        return cast("Tensor", whole[piece] if part.dim == 0 else whole[:, piece])
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
