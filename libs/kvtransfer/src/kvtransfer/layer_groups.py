"""Layers whose cache is allocated together, and which of its tokens a context-parallel rank holds. Frozen values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvtransfer.pools import MapperKind, PoolView, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ShardingKind(Enum):
    """How context parallelism deals out the tokens of a sequence. Values of `isthmus.v1.TokenShardingKind`."""

    CONTIGUOUS = 1
    ZIGZAG = 2
    INTERLEAVED = 3


@dataclass(frozen=True, slots=True)
class TokenSharding:
    """Number and index of the shards are cp_size and cp_rank; `granularity` in tokens. See `sharding.py`."""

    kind: ShardingKind
    granularity: int

    def __post_init__(self) -> None:
        value = self.granularity
        require(0 < value < 1 << 31, "token_sharding.granularity", value, "must lie in [1, 2^31)")


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Attention layers that share a block table. A block id is the slot number in every pool of the group.

    `sliding_window` in tokens, None = full attention; `draft_slack`: tokens before the window that speculative decoding
    may still read. `token_sharding` None: every context-parallel rank holds all tokens.
    """

    global_layer_ids: tuple[int, ...]
    tokens_per_block: int
    views: tuple[PoolView, ...]
    sliding_window: int | None = None
    draft_slack: int = 0
    token_sharding: TokenSharding | None = None

    def __post_init__(self) -> None:
        _check_layers(self.global_layer_ids, self.views)
        tokens = self.tokens_per_block
        require(0 < tokens < 1 << 31, "group.tokens_per_block", tokens, "must lie in [1, 2^31)")
        window = self.sliding_window
        require(window is None or window > 0, "group.sliding_window", window, "must be above 0 or absent")
        require(0 <= self.draft_slack < 1 << 31, "group.draft_slack", self.draft_slack, "must lie in [0, 2^31)")
        require(window is not None or not self.draft_slack, "group.draft_slack", self.draft_slack, "needs a window")
        for view in self.views:
            kind = view.mapper_kind
            require(kind is not MapperKind.SECTIONED, "view.mapper_kind", kind.name, "belongs to recurrent groups")


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """Layers whose state has a fixed size. One slot a sequence: the state after exactly `token_range.end` tokens."""

    global_layer_ids: tuple[int, ...]
    views: tuple[PoolView, ...]

    def __post_init__(self) -> None:
        _check_layers(self.global_layer_ids, self.views)
        for view in self.views:
            kind = view.mapper_kind
            known = kind in (MapperKind.SECTIONED, MapperKind.REPLICATED)
            require(known, "view.mapper_kind", kind.name, "a recurrent group has SECTIONED or REPLICATED views")


LayerGroup = AttentionGroup | RecurrentGroup


def view_spans(group: LayerGroup, view: PoolView) -> NDArray[np.int64]:
    """Bytes from the first to the end of the last one of every buffer of a view of the group, int64[E]."""
    return view.spans(group.tokens_per_block if isinstance(group, AttentionGroup) else 1)


def _check_layers(ids: tuple[int, ...], views: tuple[PoolView, ...]) -> None:
    require(bool(ids), "group.global_layer_ids", "()", "a group needs at least one layer")
    require(min(ids) >= 0 and max(ids) < 1 << 31, "group.global_layer_ids", ids, "must lie in [0, 2^31)")
    require(len(set(ids)) == len(ids), "group.global_layer_ids", ids, "names a layer twice")
    require(bool(views), "group.views", "()", "a group needs at least one view")
