"""What a WriteOrder says to one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvtransfer.ports import RankBlocks, RequestKey, TokenRange, WriteOrder


def identity(order: WriteOrder) -> tuple[RequestKey, bytes, int, TokenRange | None]:
    """Orders that ask for the same bytes are equal in this."""
    return order.key, order.incarnation, order.receive, order.window


def block_lists(blocks: tuple[RankBlocks, ...], rank: int) -> dict[int, NDArray[np.int32]]:
    """Block lists of one rank by layer group."""
    return {one.layer_group: one.blocks for one in blocks if one.rank == rank}


def begins(blocks: tuple[RankBlocks, ...], rank: int) -> dict[int, int]:
    """First tokens of the lists of one rank by layer group."""
    return {one.layer_group: one.begin for one in blocks if one.rank == rank}


def chunk_of(order: WriteOrder) -> Chunk:
    """What to write now."""
    return chunk_within(order.tokens if order.window is None else order.window, order.tokens)


def chunk_within(window: TokenRange, tokens: TokenRange) -> Chunk:
    """A part of the tokens of a KvRequest."""
    return Chunk(window, tokens, is_first=window.begin <= tokens.begin, is_last=window.end == tokens.end)
