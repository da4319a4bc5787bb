"""Block lists of a request against a plan: everything is refused here before an address is computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvtransfer.group_plan import GroupPlan, GroupSide

NO_BLOCK = -1
# Up to here a loop in C over Python numbers takes less time than starting one over an array.
_FEW = 64


def first_block(side: GroupSide, begin: int, prompt: int) -> int:
    """Number of the local block that holds the first local token from `begin` on: what blocks[0] of a list is."""
    return side.shard.local_count(begin, prompt) // side.block


def listed_blocks(side: GroupSide, begin: int, prompt: int) -> int:
    """How many local blocks tokens [begin, prompt) touch."""
    held = side.shard.local_count(prompt, prompt)
    if held <= side.shard.local_count(begin, prompt):
        return 0
    return -(-held // side.block) - first_block(side, begin, prompt)


def destination_list(
    group: GroupPlan, lists: Mapping[int, NDArray[np.int32]], begin: int, prompt: int
) -> NDArray[np.int64]:
    """The destination list of the group. Raises PlanError: missing, wrong length, out of range, a block named twice."""
    number = group.dst.number
    if number not in lists:
        raise PlanError(f"no destination blocks for layer group {number}")
    blocks = _in_range(lists[number], group.dst.blocks, f"destination group {number}")
    count = 1 if group.recurrent else listed_blocks(group.dst, begin, prompt)
    if len(blocks) != count:
        what = "the state of one sequence" if group.recurrent else f"tokens [{begin}, {prompt})"
        unit = "slots" if group.recurrent else f"blocks of {group.dst.block} tokens"
        raise PlanError(f"destination group {number} lists {len(blocks)} blocks, {what} fill {count} {unit}")
    if len(blocks) > _FEW or len(set(blocks.tolist())) < len(blocks):
        named = np.sort(blocks[blocks != NO_BLOCK])
        twice = named[:-1][named[:-1] == named[1:]]
        if len(twice):
            raise PlanError(f"destination group {number} names block {int(twice[0])} twice")
    return blocks


def source_list(group: GroupPlan, lists: Mapping[int, NDArray[np.int32]]) -> NDArray[np.int64]:
    """The source list of the group. Raises PlanError: missing or out of range."""
    number = group.src.number
    if number not in lists:
        raise PlanError(f"no source blocks for layer group {number}")
    return _in_range(lists[number], group.src.blocks, f"source group {number}")


def pick_source(
    group: GroupPlan, blocks: NDArray[np.int64], wanted: NDArray[np.int64], begin: int, prompt: int
) -> NDArray[np.int64]:
    """Ids of the `wanted` local blocks from a list that starts at token `begin`. Raises PlanError for one not held."""
    index = wanted - first_block(group.src, begin, prompt)
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= len(blocks)):
        held = f"{len(blocks)} blocks of {group.src.block} tokens from token {begin}"
        need = f"blocks {int(wanted.min())} to {int(wanted.max())}"
        raise PlanError(f"source group {group.src.number} lists {held}, the request needs {need} of the prompt")
    picked = blocks[index]
    gone = wanted[picked == NO_BLOCK]
    if len(gone):
        raise PlanError(f"source group {group.src.number} no longer holds block {int(gone[0])} of the prompt")
    return picked


def _in_range(blocks: NDArray[np.int32], limit: int, what: str) -> NDArray[np.int64]:
    if blocks.ndim != 1 or blocks.dtype != np.int32:
        raise PlanError(f"{what}: blocks must be 1-d int32, not {blocks.dtype}{list(blocks.shape)}")
    if len(blocks) and not _all_in(blocks, limit):
        wrong = blocks[(blocks < NO_BLOCK) | (blocks >= limit)]
        raise PlanError(f"{what} names block {int(wrong[0])}, blocks lie in [0, {limit}), -1 is none")
    return blocks.astype(np.int64)


def _all_in(blocks: NDArray[np.int32], limit: int) -> bool:
    """True when every block, there is at least one, is NO_BLOCK or in [0, limit)."""
    if len(blocks) <= _FEW:
        values = blocks.tolist()
        return min(values) >= NO_BLOCK and max(values) < limit
    return int(blocks.min()) >= NO_BLOCK and int(blocks.max()) < limit
