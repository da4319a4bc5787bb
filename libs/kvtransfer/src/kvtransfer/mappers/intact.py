"""Equal layout, equal heads, equal blocks: a buffer moves whole.

    source slot        |K L0|V L0|K L1|V L1|          destination slot   |K L0|V L0|K L1|V L1|
                       └────────one run────┘  ─────▶                     └────────one run────┘

    source slot        |K L0|V L0|K L1|V L1|          destination pools  |K L0| … |K L1| …    |V L0| … |V L1| …
                        run0 run1 run2 run3   ─────▶                      run0     run2        run1     run3

Invariant: the buffer has the same bytes in the same order on both sides, so neighbours may be joined wherever they
follow each other on BOTH sides. Only whole blocks: a token range inside a block is cut by the mapper of the layout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.mappers._make import runs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def is_intact(pairs: BufferPairs) -> NDArray[np.bool_]:
    """Where a whole block is the same bytes on both sides."""
    src, dst = pairs.src, pairs.dst
    same = (src.kind == dst.kind) & (src.tokens == dst.tokens) & (src.size == dst.size)
    same &= (src.pitch == 0) & (dst.pitch == 0)
    return (
        same
        & (pairs.unit_bytes == 0)
        & (src.lo == dst.lo)
        & (src.hi == dst.hi)
        & (pairs.lo == src.lo)
        & (pairs.hi == src.hi)
    )


def intact(pairs: BufferPairs) -> RunTable:
    """One run a buffer, all heads of a token counted as one unit. Only for whole blocks."""
    unit = pairs.src.size * 8 // pairs.src.tokens
    return runs(pairs, unit, src_step=unit, dst_step=unit, token_major=False)
