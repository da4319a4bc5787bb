"""Block lists of a request against a plan: everything is refused here before an address is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvtransfer.peer_plan import GroupPlan
    from kvtransfer.ports import TokenRange

NO_BLOCK = -1


def block_span(tokens: TokenRange, tokens_per_block: int) -> tuple[int, int]:
    """(first, count) of the blocks that hold `tokens`. Raises PlanError when the range begins inside a block: the rest
    of that block may be shared at the destination and must not be written."""
    if not 0 <= tokens.begin <= tokens.end:
        raise PlanError(f"tokens [{tokens.begin}, {tokens.end}) run backwards")
    if tokens.begin % tokens_per_block:
        raise PlanError(f"tokens begin at {tokens.begin}, not at a multiple of the block size {tokens_per_block}")
    first = tokens.begin // tokens_per_block
    return first, -(-tokens.end // tokens_per_block) - first


def check_blocks(
    group: GroupPlan, dst_blocks: Mapping[int, NDArray[np.int32]], tokens: TokenRange
) -> NDArray[np.int64]:
    """The destination list of the group as int64. Raises PlanError: missing, wrong length, out of range, duplicates."""
    _, count = block_span(tokens, group.tokens_per_block)
    if group.dst_group not in dst_blocks:
        raise PlanError(f"no destination blocks for layer group {group.dst_group}")
    dst = _in_range(dst_blocks[group.dst_group], group.dst_blocks, f"destination group {group.dst_group}")
    if len(dst) != count:
        raise PlanError(
            f"destination group {group.dst_group} lists {len(dst)} blocks, tokens [{tokens.begin}, {tokens.end}) "
            f"fill {count} of {group.tokens_per_block} tokens"
        )
    named = np.sort(dst[dst != NO_BLOCK])
    twice = named[:-1][named[:-1] == named[1:]]
    if len(twice):
        raise PlanError(f"destination group {group.dst_group} names block {int(twice[0])} twice")
    return dst


def select_blocks(
    group: GroupPlan,
    src_blocks: Mapping[int, NDArray[np.int32]],
    dst_blocks: Mapping[int, NDArray[np.int32]],
    tokens: TokenRange,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(source, destination) blocks to move, int64[B], without the positions where the destination wants nothing."""
    dst = check_blocks(group, dst_blocks, tokens)
    first, count = block_span(tokens, group.tokens_per_block)
    if group.src_group not in src_blocks:
        raise PlanError(f"no source blocks for layer group {group.src_group}")
    src = _in_range(src_blocks[group.src_group], group.src_blocks, f"source group {group.src_group}")
    if len(src) < first + count:
        raise PlanError(
            f"source group {group.src_group} lists {len(src)} blocks, tokens up to {tokens.end} fill {first + count} "
            f"of {group.tokens_per_block} tokens"
        )
    src = src[first : first + count]
    wanted = dst != NO_BLOCK
    gone = np.flatnonzero(wanted & (src == NO_BLOCK))
    if len(gone):
        raise PlanError(f"source group {group.src_group} no longer holds block {first + int(gone[0])} of the prompt")
    return src[wanted], dst[wanted]


def _in_range(blocks: NDArray[np.int32], limit: int, what: str) -> NDArray[np.int64]:
    if blocks.ndim != 1 or blocks.dtype != np.int32:
        raise PlanError(f"{what}: blocks must be 1-d int32, not {blocks.dtype}{list(blocks.shape)}")
    wrong = blocks[(blocks < NO_BLOCK) | (blocks >= limit)]
    if len(wrong):
        raise PlanError(f"{what} names block {int(wrong[0])}, blocks lie in [0, {limit}), -1 is none")
    return blocks.astype(np.int64)
