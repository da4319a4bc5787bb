"""Token-major on both sides: a head interval is contiguous in a token and comes again with every token.

    source buffer        | t0: h0 h1 h2 h3 | t1: h0 h1 h2 h3 | …          heads [0, 4)
                                    └──┘              └──┘
    destination buffer   | t0: h2 h3 | t1: h2 h3 | …                      heads [2, 4)
                               └───┘       └───┘

Invariant: offset(token, head) = (token * heads held + head - first head) * bits. One run a token; where both sides hold
exactly the interval, the tokens follow each other and the run goes on to the end of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.mappers._make import runs

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def nhd(pairs: BufferPairs) -> RunTable:
    """A run a buffer, repeated by its steps. Raises UnalignedSlice."""
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
