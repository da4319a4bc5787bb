"""Head-major to token-major or back: one token of one head is the largest piece that both sides keep together.

    source HND        | h0: t0 t1 t2 | h1: t0 t1 t2 |
                             └┘└┘└┘
    destination NHD   | t0: h0 h1 | t1: h0 h1 | t2: h0 h1 |
                            └┘          └┘          └┘

Invariant: HND steps one unit (or the pitch of its view) from token to token of a head, NHD all heads it holds.
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
    src_step, dst_step = heads.src.step_bits, heads.dst.step_bits
    return runs(
        heads,
        heads.src.unit_bits,
        src_step=src_step,
        dst_step=(heads.dst.hi - heads.dst.lo) * dst_step,
        token_major=True,
        src_bits=(head - heads.src.lo) * heads.src.tokens * src_step,
        dst_bits=(head - heads.dst.lo) * dst_step,
    )


def nhd_to_hnd(pairs: BufferPairs) -> RunTable:
    """A run a head, repeated by its steps. Raises UnalignedSlice."""
    which, head = expand(pairs.lo, pairs.hi)
    heads = pairs.take(which)
    src_step, dst_step = heads.src.step_bits, heads.dst.step_bits
    return runs(
        heads,
        heads.src.unit_bits,
        src_step=(heads.src.hi - heads.src.lo) * src_step,
        dst_step=dst_step,
        token_major=False,
        src_bits=(head - heads.src.lo) * src_step,
        dst_bits=(head - heads.dst.lo) * heads.dst.tokens * dst_step,
    )
