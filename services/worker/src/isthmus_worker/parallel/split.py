"""How a model is cut: layers over stages, heads and rows over tensor-parallel ranks. Pure.

Heads are cut in whole KV groups, the remainder goes to the low ranks. With more ranks than KV heads the query heads are
cut instead, and a KV head is on every rank whose query heads use it:

    9 query, 3 KV heads over 2 ranks          12 query, 3 KV heads over 4 ranks
    rank 0: q 0-5, kv 0-1                     rank 0: q 0-2,  kv 0        rank 2: q 6-8,  kv 1-2
    rank 1: q 6-8, kv 2                       rank 1: q 3-5,  kv 0-1      rank 3: q 9-11, kv 2

Attention wants as many query heads for each KV head of a rank. Where there are fewer, zero heads fill the place: their
weights are zero on the way in and on the way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeadShard:
    """Heads of one rank. `kv` = [begin, end) of the global KV heads; `queries[i]` = [begin, end) of the global query
    heads that use the i-th of them here; the rank has `group` places for each."""

    kv: tuple[int, int]
    queries: tuple[tuple[int, int], ...]
    group: int

    @property
    def kv_heads(self) -> int:
        """KV heads here."""
        return self.kv[1] - self.kv[0]

    @property
    def heads(self) -> int:
        """Places for query heads here, zero heads included."""
        return self.kv_heads * self.group


def even(total: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` intervals of [0, total); the first ones are one longer. May be empty."""
    size, more = divmod(total, parts)
    begin = index * size + min(index, more)
    return begin, begin + size + (index < more)


def padded(total: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` intervals of [0, total), all of ceil(total / parts) except the last ones, which end at
    `total` and may be empty: what is gathered from them has one size."""
    size = -(-total // parts)
    return min(index * size, total), min((index + 1) * size, total)


def head_shard(heads: int, kv_heads: int, parts: int, index: int) -> HeadShard:
    """`heads` is a multiple of `kv_heads`. Raises ConfigError when a rank would have no head."""
    if parts > heads:
        raise ConfigError(
            f"parallel.tensor_parallel_size / data_parallel_size = {parts}: the model has {heads} attention heads, use "
            f"at most {heads}"
        )
    group = heads // kv_heads
    if parts <= kv_heads:
        kv = even(kv_heads, parts, index)
        return HeadShard(kv, tuple((head * group, (head + 1) * group) for head in range(*kv)), group)
    begin, end = even(heads, parts, index)
    kv = (begin // group, (end - 1) // group + 1)
    queries = tuple((max(begin, head * group), min(end, (head + 1) * group)) for head in range(*kv))
    return HeadShard(kv, queries, max(last - first for first, last in queries))


def stage_layers(layers: int, stages: int, split: Sequence[int] | None, stage: int) -> range:
    """Global ids of the layers of a stage. Raises ConfigError for a split that is not one of this model's layers."""
    if stages > layers:
        raise ConfigError(
            f"parallel.pipeline_parallel_size = {stages}: the model has {layers} layers, use at most {layers}"
        )
    if split is None:
        return range(*even(layers, stages, stage))
    if sum(split) != layers:
        raise ConfigError(
            f"parallel.layer_split = {list(split)}: its sum is {sum(split)}, the model has {layers} layers"
        )
    return range(sum(split[:stage]), sum(split[: stage + 1]))
