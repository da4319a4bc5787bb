"""Which model a folder of safetensors holds, without loading it: the digest that two instances compare.

xxh3_128 over name and digest of every weight in the order of the names, that of a weight being over shape, dtype and
bytes; how a checkpoint is cut into files does not matter. Left out is what no engine uses: an output matrix that is
tied to the input, rotary frequencies. The reference engine computes the same while it loads.
"""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash

from kvtransfer.errors import KVTransferError

_HEADER = struct.Struct("<Q")
_MAX_HEADER = 1 << 28
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq",)
_TIED = "lm_head.weight"
# The digest names dtypes as torch does, whoever computes it.
_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip


class CheckpointUnreadable(KVTransferError):
    """The folder does not hold readable safetensors. Names the file."""


@dataclass(frozen=True, slots=True)
class _Weight:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weights_digest(folder: Path, *, tied: bool) -> bytes:
    """16 bytes. `tied`: the output matrix is the input matrix. Raises CheckpointUnreadable."""
    weights: dict[str, _Weight] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointUnreadable(f"{folder}: holds no *.safetensors; the model can not be told from another one")
    for file in files:
        weights.update(_weights(file))
    digest = xxhash.xxh3_128()
    opened: dict[Path, mmap.mmap] = {}
    try:
        for name in sorted(weights):
            if name.endswith(_UNUSED_SUFFIXES) or (tied and name == _TIED):
                continue
            one = weights[name]
            if one.file not in opened:
                with one.file.open("rb") as file:
                    opened[one.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            shape = ",".join(map(str, one.shape))
            weight = xxhash.xxh3_128(f"{shape}\0torch.{_NAMES.get(one.dtype, one.dtype)}\0".encode())
            with memoryview(opened[one.file]) as view, view[one.begin : one.end] as part:
                weight.update(part)
            digest.update(name.encode() + b"\0" + weight.digest())
    finally:
        for mapped in opened.values():
            mapped.close()
    return digest.digest()


def _weights(path: Path) -> dict[str, _Weight]:
    try:
        with path.open("rb") as file:
            (length,) = _HEADER.unpack(file.read(_HEADER.size))
            if length > _MAX_HEADER:
                raise CheckpointUnreadable(f"{path}: a header of {length} bytes is none of safetensors")
            header = cast("dict[str, Any]", json.loads(file.read(length)))
        size, start = path.stat().st_size, _HEADER.size + length
        found: dict[str, _Weight] = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            begin, end = (int(offset) + start for offset in about["data_offsets"])
            if not start <= begin <= end <= size:
                raise CheckpointUnreadable(f"{path}: {name} lies outside of the file; fetch it again")
            found[name] = _Weight(path, str(about["dtype"]), tuple(map(int, about["shape"])), begin, end)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointUnreadable(f"{path}: is not a readable safetensors file ({error})") from error
    return found
