"""How the four ranks of an instance share the model: two layers of four KV heads.

tp   rank r has head r of both layers
pp   ranks 0, 1: layer 0; ranks 2, 3: layer 1; the first of each two has heads 0 and 1, the other one 2 and 3
dp   two groups of two, each with a cache of its own for its own requests: heads as in pp, both layers
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kvtransfer.rank_info import Topology

RANKS = 4
HEADS = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """`groups` of attention dp, `stages` of the pipeline."""

    name: str
    groups: int = 1
    stages: int = 1

    def topology(self, rank: int) -> Topology:
        """Of one rank."""
        return _topology(self, rank)

    def layers(self, rank: int) -> tuple[int, ...]:
        """Global layers that a rank has."""
        return (0, 1) if self.stages == 1 else (rank // (RANKS // self.stages),)

    def heads(self, rank: int) -> tuple[int, ...]:
        """Global KV heads that a rank has."""
        ways = RANKS // (self.groups * self.stages)
        each = HEADS // ways
        first = rank % ways * each
        return tuple(range(first, first + each))

    def ranks(self, dp_rank: int) -> tuple[int, ...]:
        """Flat ranks of an attention-dp group."""
        size = RANKS // self.groups
        return tuple(range(dp_rank * size, dp_rank * size + size))


@cache
def _topology(shape: Shape, rank: int) -> Topology:
    wide = RANKS // shape.stages
    return Topology(
        pp_size=shape.stages,
        tp_size=wide,
        dp_size=shape.groups,
        pp_rank=rank // wide,
        tp_rank=rank % wide,
    )


TP, PP, DP = Shape("tp"), Shape("pp", stages=2), Shape("dp", groups=2)
# Of the context and the generation instances of a schedule. Most schedules have the first: the others cost more.
PAIRS = ((TP, TP), (TP, TP), (TP, TP), (PP, TP), (TP, PP), (DP, TP), (TP, DP), (DP, PP))
