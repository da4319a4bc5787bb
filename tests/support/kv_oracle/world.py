"""Both instances of a case, their ranks and block lists: what the planner is handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.codes import Codes
from kv_oracle.request import block_list
from kv_oracle.tables import Instance, build_instance
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kv_oracle.expected import Lists
    from kv_oracle.request import Case

I32 = np.int32


@dataclass
class World:
    """Both instances of a case with memory and block lists of the ranks that hold the request."""

    case: Case
    codes: Codes
    src: Instance
    dst: Instance
    src_lists: dict[int, Lists]
    dst_lists: dict[int, Lists]

    @property
    def window(self) -> TokenRange:
        """What the generation asks for: from the earliest token that any group lacks."""
        return TokenRange(min(self.case.begin_dst), self.case.prompt)

    def chunks(self) -> list[Chunk]:
        """The prompt in the pieces in which the context computes it."""
        spans = self.case.chunks
        return [
            Chunk(TokenRange(begin, end), self.window, is_first=i == 0, is_last=i == len(spans) - 1)
            for i, (begin, end) in enumerate(spans)
        ]


def build_world(case: Case) -> World:
    """Both sides of a case, nothing filled in yet."""
    src = build_instance(case.model, case.src, case.slots(case.src), InstanceRole.CONTEXT, "context-0")
    dst = build_instance(case.model, case.dst, case.slots(case.dst), InstanceRole.GENERATION, "generation-0")
    sides: list[dict[int, Lists]] = []
    for name, instance in (("src", src), ("dst", dst)):
        sides.append(
            {
                rank: {
                    group.group: block_list(case, name, rank, instance.places[rank].cp, group.group)
                    for group in instance.storages[rank].groups
                }
                for rank in instance.holders
            }
        )
    return World(case, Codes(case.model), src, dst, *sides)


def arrays(instance: Instance, rank: int, lists: Lists) -> tuple[dict[int, NDArray[np.int32]], dict[int, int]]:
    """Block lists and first tokens by layer group of the rank's page table."""
    order = [group.group for group in instance.storages[rank].groups]
    blocks = {i: np.array(lists[g].slots, I32) for i, g in enumerate(order)}
    return blocks, {i: lists[g].begin for i, g in enumerate(order)}


def begins(world: World) -> dict[tuple[int, int], int]:
    """(destination rank, its layer group) -> first token it lacks."""
    found: dict[tuple[int, int], int] = {}
    for rank, lists in world.dst_lists.items():
        for i, group in enumerate(world.dst.storages[rank].groups):
            found[rank, i] = lists[group.group].begin
    return found
