"""What both sides compare before the first byte moves: (destination interval -> writer), never runs or merging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvtransfer.holdings import Holdings
    from kvtransfer.overlap import Atoms
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.sharding import Shard


def atoms_digest(src: Holdings, dst: Holdings, atoms: Atoms) -> bytes:
    """xxh3_128 over one row of little-endian int64 for each interval of units of each layer, sorted:
    (dst rank, layer group, view, section, layer, lo, hi, src rank, token shard of the source, of the destination)."""
    mine, yours = src.part[atoms.src_row], dst.part[atoms.dst_row]
    columns = [dst.column(name)[yours] for name in ("rank", "group", "view", "order")]
    columns += [dst.layer[atoms.dst_row], atoms.lo, atoms.hi, src.column("rank")[mine]]
    columns += [*_shards([part.shard for part in src.parts], mine), *_shards([part.shard for part in dst.parts], yours)]
    order = np.lexsort(columns[::-1])
    rows = np.stack(columns, axis=1)[order].astype("<i8")
    return xxhash.xxh3_128_digest(rows.tobytes())


def rank_digest(plans: Iterable[PeerPlan]) -> bytes:
    """Digest of one context rank over its plans in order of dst_rank: `PeerLoaded.plan_digest`."""
    return xxhash.xxh3_128_digest(b"".join(plan.digest for plan in sorted(plans, key=lambda plan: plan.dst_rank)))


def combine_digests(digests: Sequence[bytes]) -> bytes:
    """Digest of an instance from those of its context ranks in flat order: `Welcome.plan_digest`."""
    return xxhash.xxh3_128_digest(b"".join(digests))


def _shards(shards: list[Shard], part: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    rows = np.array([_numbers(shard) for shard in shards], np.int64)
    return [rows[part, i] for i in range(rows.shape[1])]


def _numbers(shard: Shard) -> tuple[int, int, int, int]:
    if shard.whole or shard.sharding is None:
        return 0, 0, 1, 0
    return shard.sharding.kind.value, shard.sharding.granularity, shard.count, shard.index
