"""Token-major on both sides: a head interval is contiguous in a token and comes again with every token.

    source buffer        | t0: h0 h1 h2 h3 | t1: h0 h1 h2 h3 | …          heads [0, 4)
                                    └──┘              └──┘
    destination buffer   | t0: h2 h3 | t1: h2 h3 | …                      heads [2, 4)
                               └───┘       └───┘

Invariant: offset(token, head) = (token * heads held + head - first head) * bits. One run a token; where both sides hold
exactly the interval, the tokens follow each other and the run goes on to the end of the block. In a view with a pitch
the heads of a token do not follow each other: a run a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.arrays import expand
from kvtransfer.mappers._make import runs
from kvtransfer.run_table import concatenate

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def nhd(pairs: BufferPairs) -> RunTable:
    """A run a buffer, or a head where a side has a pitch, repeated by its steps. Raises UnalignedSlice."""
    dense = (pairs.src.pitch == 0) & (pairs.dst.pitch == 0)
    if dense.all():
        return _dense(pairs)
    return concatenate([_dense(pairs.take(np.flatnonzero(dense))), _pitched(pairs.take(np.flatnonzero(~dense)))])


def _pitched(pairs: BufferPairs) -> RunTable:
    which, head = expand(pairs.lo, pairs.hi)
    heads = pairs.take(which)
    src_step, dst_step = heads.src.step_bits, heads.dst.step_bits
    return runs(
        heads,
        heads.src.unit_bits,
        src_step=(heads.src.hi - heads.src.lo) * src_step,
        dst_step=(heads.dst.hi - heads.dst.lo) * dst_step,
        token_major=True,
        src_bits=(head - heads.src.lo) * src_step,
        dst_bits=(head - heads.dst.lo) * dst_step,
    )


def _dense(pairs: BufferPairs) -> RunTable:
    bits = pairs.src.unit_bits
    return runs(
        pairs,
        (pairs.hi - pairs.lo) * bits,
        src_step=(pairs.src.hi - pairs.src.lo) * bits,
        dst_step=(pairs.dst.hi - pairs.dst.lo) * bits,
        token_major=True,
        src_bits=(pairs.lo - pairs.src.lo) * bits,
        dst_bits=(pairs.lo - pairs.dst.lo) * bits,
    )
