"""Head-major on both sides: the tokens of a head are contiguous, a head is found by its number.

    source buffer        | h0: t0 t1 t2 t3 | h1: t0 t1 t2 t3 |            heads [0, 2), 4 tokens
                                            └──── run ──────┘
    destination buffer   | h1: t0 t1 t2 t3 | h2: t0 t1 t2 t3 |            heads [1, 3), 4 tokens
                          └──── run ──────┘

    destination block of 8 tokens   | h1: t0 … t3 t4 … t7 | h2: …
                                                └─ run ─┘         unequal blocks: a run a head, `phase` tokens into it

Invariant: offset(head, token) = ((head - first head) * tokens + token) * step on either side, with its own `tokens` and
step (the bits of a unit, or the pitch of its view).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.arrays import expand
from kvtransfer.mappers._make import runs

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def hnd(pairs: BufferPairs) -> RunTable:
    """A run a head. Raises UnalignedSlice."""
    which, head = expand(pairs.lo, pairs.hi)
    heads = pairs.take(which)
    src_step, dst_step = heads.src.step_bits, heads.dst.step_bits
    return runs(
        heads,
        heads.src.unit_bits,
        src_step=src_step,
        dst_step=dst_step,
        token_major=False,
        src_bits=(head - heads.src.lo) * heads.src.tokens * src_step,
        dst_bits=(head - heads.dst.lo) * heads.dst.tokens * dst_step,
    )
