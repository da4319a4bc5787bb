"""Head-major to token-major or back: one token of one head is the largest piece that both sides keep together.

    source HND        | h0: t0 t1 t2 | h1: t0 t1 t2 |
                             └┘└┘└┘
    destination NHD   | t0: h0 h1 | t1: h0 h1 | t2: h0 h1 |
                            └┘          └┘          └┘

Invariant: HND steps one token's bits from token to token of a head, NHD those of all heads it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.arrays import expand
from kvtransfer.mappers._make import runs

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def hnd_to_nhd(pairs: BufferPairs) -> RunTable:
    """A run a head, repeated by its steps. Raises UnalignedSlice."""
    which, head = expand(pairs.lo, pairs.hi)
    heads = pairs.take(which)
    bits = heads.src.unit_bits
    return runs(
        heads,
        bits,
        src_step=bits,
        dst_step=(heads.dst.hi - heads.dst.lo) * bits,
        token_major=True,
        src_bits=(head - heads.src.lo) * heads.src.tokens * bits,
        dst_bits=(head - heads.dst.lo) * bits,
    )


def nhd_to_hnd(pairs: BufferPairs) -> RunTable:
    """A run a head, repeated by its steps. Raises UnalignedSlice."""
    which, head = expand(pairs.lo, pairs.hi)
    heads = pairs.take(which)
    bits = heads.src.unit_bits
    return runs(
        heads,
        bits,
        src_step=(heads.src.hi - heads.src.lo) * bits,
        dst_step=bits,
        token_major=False,
        src_bits=(head - heads.src.lo) * bits,
        dst_bits=(head - heads.dst.lo) * heads.dst.tokens * bits,
    )
