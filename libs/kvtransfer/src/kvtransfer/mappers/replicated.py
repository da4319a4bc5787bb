"""The same bytes on every tensor-parallel rank (MLA latent, indexer keys): no heads, one elected source.

    sources       rank 0 | t0 t1 t2 t3 |    rank 1 | t0 t1 t2 t3 |        either would do, the election names one
                           └── run ──┘
    destination          | t0 t1 t2 t3 |

Invariant: a token is `size / tokens` bytes, tokens follow each other or come a pitch apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.mappers._make import runs

if TYPE_CHECKING:
    from kvtransfer.buffer_pairs import BufferPairs
    from kvtransfer.run_table import RunTable


def replicated(pairs: BufferPairs) -> RunTable:
    """A run a buffer."""
    return runs(
        pairs, pairs.src.unit_bits, src_step=pairs.src.step_bits, dst_step=pairs.dst.step_bits, token_major=True
    )
