"""How one instance spreads a model: ranks, heads, token shards, blocks, pools. Values only, no addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kv_oracle.model import Model


@dataclass(frozen=True)
class GroupStorage:
    """How every rank of the instance stores one group of the model.

    `arrangement`: "layer_major" one pool per part, a slot holds one layer; "slot_major" one pool, a slot holds
    everything; "interleaved" the same memory seen as one pool per part; "part_pools" one slot-major pool per part;
    "layer_pools" one pool per part and layer.
    `gap`: unused bytes between buffers. `reverse`: layers lie in memory (and in the table) backwards.
    `sharding`: ("contiguous" | "zigzag" | "interleaved", granularity) of tokens over context-parallel ranks, None = all
    of them hold all tokens. `draft_slack`: tokens that a sliding window keeps for speculation.
    """

    tokens_per_block: int
    arrangement: str
    layouts: tuple[str, ...]  # "hnd" | "nhd" per part; ignored where nothing is cut by heads
    gap: int = 0
    reverse: bool = False
    spare_slots: int = 1
    sharding: tuple[str, int] | None = None
    draft_slack: int = 0


@dataclass(frozen=True)
class Deployment:
    """`pp`: layers of each pipeline stage. tp_size = dp * tp. `heads`: "covering" | "balanced", see `head_interval`.

    `cuts`: how the pools are registered: "one" region, one per "pool", or "many" cut between buffers. `shared`: all
    groups in one slot-major pool, each "beside" the others in every slot, or "same": a slot belongs to one group at a
    time, as its block ids say; "" = pools of their own, as each group's arrangement says.
    """

    pp: tuple[int, ...]
    tp: int
    dp: int
    cp: int
    heads: str
    groups: tuple[GroupStorage, ...]
    group_order: tuple[int, ...]
    cuts: str = "one"
    shared: str = ""
    dp_rank: int = 0

    @property
    def world(self) -> int:
        """Ranks of the instance."""
        return len(self.pp) * self.tp * self.dp * self.cp

    def flat(self, pp: int, tp_in_group: int, cp: int, dp: int | None = None) -> int:
        """Flat rank: pipeline slowest, then attention dp, then tensor, context parallel fastest."""
        group = self.dp_rank if dp is None else dp
        ranks_per_stage = self.tp * self.dp * self.cp
        return pp * ranks_per_stage + (group * self.tp + tp_in_group) * self.cp + cp

    def stage_layers(self, model: Model, stage: int) -> tuple[int, ...]:
        """Global layer ids of a pipeline stage."""
        first = sum(self.pp[:stage])
        return model.layers[first : first + self.pp[stage]]

    def local_layers(self, model: Model, stage: int, group: int) -> tuple[int, ...]:
        """Global layer ids of one group on a stage, in the order of this instance's memory."""
        here = set(self.stage_layers(model, stage))
        mine = [layer for layer in model.groups[group].layers if layer in here]
        return tuple(reversed(mine)) if self.groups[group].reverse else tuple(mine)


def head_interval(style: str, heads: int, tp: int, rank: int) -> tuple[int, int]:
    """[begin, end) of the KV heads that a tensor-parallel rank holds.

    "covering": every head that serves one of the rank's query heads, so neighbours may share heads
    (3 heads over 2 ranks: [0, 2) and [1, 3)). "balanced": each head once; needs tp <= heads.
    """
    begin = rank * heads // tp
    end = -(-(rank + 1) * heads // tp) if style == "covering" else (rank + 1) * heads // tp
    assert begin < end
    return begin, end


def owner_of(sharding: tuple[str, int], shards: int, prompt: int, token: int) -> int:
    """Context-parallel rank that holds a token of a prompt."""
    kind, grain = sharding
    if kind == "interleaved":
        return token // grain % shards
    pieces = shards if kind == "contiguous" else 2 * shards
    piece = token // (grain * -(-prompt // (pieces * grain)))
    return piece if piece < shards else pieces - 1 - piece


def local_tokens(storage: GroupStorage, cp: int, cp_rank: int, prompt: int) -> list[int]:
    """Global tokens that a rank holds, ascending: local token i is the i-th of them."""
    if storage.sharding is None or cp == 1:
        return list(range(prompt))
    return [t for t in range(prompt) if owner_of(storage.sharding, cp, prompt, t) == cp_rank]
