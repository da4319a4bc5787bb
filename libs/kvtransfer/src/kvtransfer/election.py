"""Exactly one writer for every destination byte. The unit is the atom: (layer, head or unit of a section, token shard).

    replicas of an atom, in flat order     r0   r1   r2                    dup = 3
    writer                                 replica (dp_rank + hash(destination instance) + layer) mod dup

so that one destination loads all replicas, and many small destinations do too. `dp_rank` is that of the destination.
Both sides elect for themselves and compare digests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.holdings import Holdings
    from kvtransfer.overlap import Atoms


def instance_seed(instance_id: str) -> int:
    """xxh3_64 of the destination's id."""
    return xxhash.xxh3_64_intdigest(instance_id.encode())


def elect(src: Holdings, dst: Holdings, atoms: Atoms, seed: int | None) -> Atoms:
    """Of the atoms that differ in the source rank only, one. Every attention-dp group of the source elects for itself:
    a request is in one of them. `seed` None: only dp_rank chooses, as TensorRT-LLM does. In order of dst_row."""
    if not len(atoms):
        return atoms
    part = src.part[atoms.src_row]
    rank, dp = src.column("rank")[part], src.column("dp")[part]
    shard = src.column("shard_index")[part]
    order = np.lexsort((rank, shard, dp, atoms.lo, atoms.dst_row))
    new = np.zeros(len(order), np.bool_)
    new[0] = True
    for column in (shard, dp, atoms.lo, atoms.dst_row):
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    first = np.flatnonzero(new)
    replicas = np.diff(first, append=len(order))
    row = atoms.dst_row[order[first]]
    turn = dst.column("dp")[dst.part[row]]
    if seed is not None:
        # seed mod dup by itself: the sum of three could leave 64 bits, and both sides must get the same number.
        turn = turn + dst.layer[row] + _seed_modulo(seed, replicas)
    return atoms.take(order[first + turn % replicas])


def _seed_modulo(seed: int, replicas: NDArray[np.int64]) -> NDArray[np.int64]:
    return (np.uint64(seed) % replicas.astype(np.uint64)).astype(np.int64)
