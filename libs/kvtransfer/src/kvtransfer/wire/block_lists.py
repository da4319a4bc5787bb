"""Block lists of all ranks of a message in two fields: their places as columns, their ids one after the other.

    le_uint32   rank × count │ layer group × count │ begin × count │ length × count
    le_int32    ids of list 0 │ ids of list 1 │ …

A list costs one slice of an array that lies over the bytes, not a message of its own.
"""

from __future__ import annotations

from itertools import accumulate
from struct import Struct
from struct import error as StructError
from typing import TYPE_CHECKING

import numpy as np
from isthmus.v1 import transfer_blocks_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import RankBlocks
from kvtransfer.wire._columns import columns_from_bytes, is_same, joined_columns, named_rows

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_BLOCK_IDS = 1 << 22
MAX_BLOCK_LISTS = 1 << 12

I32 = np.dtype("<i4")
_COLUMNS = 4
PLACE = Struct("<4I")


def write_block_lists(lists: Iterable[RankBlocks], into: transfer_blocks_pb2.BlockLists) -> None:
    """Fills a field of a message; it is there afterwards, also when there is no list."""
    lists = tuple(lists)
    if len(lists) == 1:
        write_one_list(lists[0], into)
        return
    into.SetInParent()
    if not lists:
        return
    ranks, groups, ids, begins = zip(*lists, strict=True)
    lengths = [len(one) for one in ids]
    into.count = len(lists)
    into.le_uint32 = joined_columns("I", (ranks, groups, begins, lengths))
    into.le_int32 = np.concatenate(ids).astype(I32, copy=False).tobytes()


def write_one_list(one: RankBlocks, into: transfer_blocks_pb2.BlockLists) -> None:
    """All that a group of one rank ever asks for: a third of the cost of columns. Into a field of a message."""
    rank, group, ids, begin = one
    into.count = 1
    try:
        into.le_uint32 = PLACE.pack(rank, group, begin, len(ids))
    except StructError as error:
        raise ValueError(f"the place of a block list, {(rank, group, begin)}, does not fit: {error}") from error
    into.le_int32 = (ids if ids.dtype is I32 else ids.astype(I32, copy=False)).tobytes()


def block_lists_to_pb(lists: Iterable[RankBlocks]) -> transfer_blocks_pb2.BlockLists:
    """The message by itself."""
    pb = transfer_blocks_pb2.BlockLists()
    write_block_lists(lists, pb)
    return pb


def block_lists_from_pb(pb: transfer_blocks_pb2.BlockLists, field: str) -> tuple[RankBlocks, ...]:
    """All lists of one message. Raises WireError on lengths that do not fit, too many ids, or a (rank, group) named
    twice."""
    count, data, places = pb.count, pb.le_int32, pb.le_uint32
    if count == 1 and len(places) == PLACE.size and len(data) <= MAX_BLOCK_IDS * 4:
        rank, group, begin, length = PLACE.unpack(places)
        if length * 4 == len(data):
            return (RankBlocks(rank, group, np.frombuffer(data, I32), begin),)
    if count > MAX_BLOCK_LISTS:
        raise WireError(f"{field}.count", f"{count} lists, at most {MAX_BLOCK_LISTS} are accepted")
    if len(data) > MAX_BLOCK_IDS * 4:
        raise WireError(f"{field}.le_int32", f"{len(data) >> 2} ids, at most {MAX_BLOCK_IDS} are accepted")
    ranks, groups, begins, lengths = columns_from_bytes("I", places, count, _COLUMNS, f"{field}.le_uint32")
    if sum(lengths) * 4 != len(data):
        raise WireError(f"{field}.le_int32", f"{len(data)} bytes, {sum(lengths)} ids of 4 bytes were announced")
    if not count:
        return ()
    ids = np.frombuffer(data, I32)
    if len(set(zip(ranks, groups, strict=True))) != count:
        raise WireError(field, "names a (rank, layer group) twice")
    if is_same(lengths):
        parts = list(ids.reshape(count, lengths[0]))
    else:
        parts = [ids[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
    return tuple(named_rows(RankBlocks, (ranks, groups, parts, begins)))
