"""What all mappers share: buffer pairs, offsets and steps become a run table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.run_table import RunTable, UnalignedSlice

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.buffer_pairs import BufferPairs, Side


def runs(
    pairs: BufferPairs,
    unit: NDArray[np.int64],
    src_step: NDArray[np.int64],
    dst_step: NDArray[np.int64],
    *,
    token_major: bool,
    src_bits: NDArray[np.int64] | None = None,
    dst_bits: NDArray[np.int64] | None = None,
) -> RunTable:
    """One run a pair. `*_bits`: from the start of the buffer, absent = 0. Raises UnalignedSlice inside a byte."""
    return RunTable(
        src=pairs.src.address + _whole_bytes(src_bits, pairs),
        dst=pairs.dst.address + _whole_bytes(dst_bits, pairs),
        src_stride=pairs.src.stride,
        dst_stride=pairs.dst.stride,
        unit=unit,
        src_step=src_step,
        dst_step=dst_step,
        buffer=pairs.buffer,
        token_major=np.full(len(pairs), int(token_major), np.int64),
        src_region=pairs.src.region,
        dst_region=pairs.dst.region,
    )


def _whole_bytes(bits: NDArray[np.int64] | None, pairs: BufferPairs) -> NDArray[np.int64] | int:
    if bits is None:
        return 0
    wrong = np.flatnonzero(bits % 8)
    if len(wrong):
        raise UnalignedSlice(_size(pairs.src, int(wrong[0])), _size(pairs.dst, int(wrong[0])))
    return bits >> 3


def _size(side: Side, index: int) -> str:
    heads = f"heads [{int(side.lo[index])}, {int(side.hi[index])})"
    return f"{int(side.size[index])} bytes of {int(side.tokens[index])} tokens, {heads}"
