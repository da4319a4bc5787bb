"""Recurrent state: every section of a row is cut by itself.

    source row        | x: 0 1 2 3 | B: 0 1 | C: 0 1 |                    TP2, rank 0: half of x, B and C whole
                          └ 2 3 ┘    └────┘   └────┘
    destination row   | x: 2 3 | B: 0 1 | C: 0 1 |                        TP4, rank 1

Invariant: offset(section, unit) = bytes of the sections before it + (unit - first unit) * unit bytes, in each of `rows`
rows. A rank's share of x begins somewhere else than its share of B: one cut through the row would mix them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.arrays import expand
from kvtransfer.mappers._make import runs
from kvtransfer.run_table import join_units

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def sectioned(pairs: BufferPairs) -> RunTable:
    """A run for each section of each row, joined where they stay side by side: a state that is not cut is one run."""
    which, row = expand(np.zeros_like(pairs.src.tokens), pairs.src.tokens)
    rows = pairs.take(which)
    unit = rows.unit_bytes * 8
    size = (rows.hi - rows.lo) * unit
    table = runs(
        rows,
        size,
        src_step=size,
        dst_step=size,
        token_major=True,
        src_bits=(row * rows.src.row + rows.src.offset) * 8 + (rows.lo - rows.src.lo) * unit,
        dst_bits=(row * rows.dst.row + rows.dst.offset) * 8 + (rows.lo - rows.dst.lo) * unit,
    )
    return join_units(table)
