"""One case: a model, two deployments of it, one prompt with reuse on both sides and a split into chunks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kv_oracle.deployment import local_tokens
from kv_oracle.model import Attention

if TYPE_CHECKING:
    from kv_oracle.deployment import Deployment
    from kv_oracle.model import Model


@dataclass(frozen=True)
class Case:
    """`reused_src`: tokens that the context found in its own cache (the first chunk includes them). `begin_dst`: per
    group of the model, the first token that the generation lacks. `borders`: chunk ends inside the prompt, ascending.

    `held_src`: per group, how the source lists blocks that nobody reads: "all" of them, only "late" ones (the list
    begins with the first token that is read), or "holes" (-1). `holes_dst`: some destination blocks are -1: not wanted.
    `ids`: seed of the block ids. `order`: per side, how they follow each other: "ascending", "rotated" (ascending from
    somewhere in the middle) or "shuffled".
    """

    model: Model
    src: Deployment
    dst: Deployment
    prompt: int
    reused_src: int
    begin_dst: tuple[int, ...]
    borders: tuple[int, ...] = ()
    held_src: tuple[str, ...] = ()
    holes_dst: bool = False
    ids: int = 0
    order: tuple[str, str] = ("shuffled", "shuffled")

    @property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Windows [begin, end) that cover the prompt; the first begins behind the prefix that the source reused."""
        ends = (*self.borders, self.prompt)
        return tuple(zip((min(self.reused_src, ends[0]), *ends[:-1]), ends, strict=True))

    def needed_from(self, group: int) -> int:
        """First token of a group that the destination must get; the prompt's length when it needs none."""
        described = self.model.groups[group]
        begin = min(self.begin_dst[group], self.prompt)
        window = described.window if isinstance(described, Attention) else None
        if window is None or window >= self.prompt:
            return begin
        return max(begin, self.prompt - window + 1 - self.dst.groups[group].draft_slack)

    def windowed(self, group: int) -> bool:
        """True where a window shorter than the prompt decides what is sent."""
        described = self.model.groups[group]
        window = described.window if isinstance(described, Attention) else None
        return window is not None and window < self.prompt

    def own_slots(self, side: Deployment) -> tuple[int, ...]:
        """Slots per group and rank: enough for the whole prompt, and some that nobody may touch."""
        return tuple(
            (-(-self.prompt // storage.tokens_per_block) if isinstance(group, Attention) else 1) + storage.spare_slots
            for group, storage in zip(self.model.groups, side.groups, strict=True)
        )

    def slots(self, side: Deployment) -> tuple[int, ...]:
        """Slots per group and rank; a shared pool has one number of them."""
        own = self.own_slots(side)
        total = {"": None, "beside": max(own), "same": sum(own)}[side.shared]
        return own if total is None else (total,) * len(own)

    def choice(self, name: str, side: Deployment, rank: int, group: int) -> list[int]:
        """Slots from which one rank and group take theirs. No two groups have one in common if they share memory."""
        own, every = self.own_slots(side), list(range(self.slots(side)[group]))
        if side.shared != "same":
            return every
        self.random(name, rank).shuffle(every)
        return every[sum(own[:group]) : sum(own[: group + 1])]

    def random(self, *key: object) -> random.Random:
        """Alike in every run of the case."""
        return random.Random(f"{self.ids} {key}")


@dataclass(frozen=True)
class BlockList:
    """Blocks of one rank and group as they are handed to the planner: slots[0] holds token `begin`; `first` = ordinal
    of that block among the blocks of the rank's tokens. `tokens` = all global tokens that the rank holds."""

    begin: int
    first: int
    slots: tuple[int, ...]
    tokens: tuple[int, ...]

    def slot_of(self, ordinal: int) -> int:
        """Slot of a block, -1 when it is not listed."""
        at = ordinal - self.first
        return self.slots[at] if 0 <= at < len(self.slots) else -1


def block_list(case: Case, side: str, rank: int, cp_rank: int, group: int) -> BlockList:
    """The list of one rank. `side`: "src" or "dst"."""
    deployment = case.src if side == "src" else case.dst
    storage, rng = deployment.groups[group], case.random(side, rank, group)
    slots = case.choice(side, deployment, rank, group)
    if not isinstance(case.model.groups[group], Attention):
        return BlockList(min(case.begin_dst[group], case.prompt) if side == "dst" else 0, 0, (rng.choice(slots),), ())
    tokens = local_tokens(storage, deployment.cp, cp_rank, case.prompt)
    needed, size = case.needed_from(group), storage.tokens_per_block
    begin = min(case.begin_dst[group], case.prompt)
    held = case.held_src[group] if case.held_src else "all"
    if side == "src":
        begin = needed if held == "late" else 0
    first = sum(t < begin for t in tokens) // size
    last = -(-len(tokens) // size)
    count = max(0, last - first) if any(t >= begin for t in tokens) else 0
    chosen = _ordered(rng.sample(slots, count), case.order[side == "dst"], rng)
    for at in range(count):
        inside = tokens[(first + at) * size : (first + at + 1) * size]
        unread = side == "src" and held == "holes" and max(inside) < needed
        if unread or (side == "dst" and case.holes_dst and rng.random() < 0.25):
            chosen[at] = -1
    return BlockList(begin, first, tuple(chosen), tuple(tokens))


def _ordered(chosen: list[int], order: str, rng: random.Random) -> list[int]:
    if order == "shuffled":
        return chosen[::-1] if chosen == sorted(chosen) else chosen
    chosen = sorted(chosen)
    turn = rng.randrange(len(chosen)) if order == "rotated" and chosen else 0
    return chosen[turn:] + chosen[:turn]


def describe(case: Case) -> str:
    """The case for people, one fact a line."""
    lines = [f"prompt {case.prompt} tokens, source reused {case.reused_src}, destination begins at {case.begin_dst}"]
    lines.append(f"chunks {case.chunks}, block ids {' / '.join(case.order)} (seed {case.ids})")
    lines.append(f"source lists {case.held_src}, destination {'with' if case.holes_dst else 'without'} holes")
    for g, group in enumerate(case.model.groups):
        lines.append(f"group {g}: {group}")
    for name, side in (("source", case.src), ("destination", case.dst)):
        lines.append(
            f"{name}: pp {side.pp} tp {side.tp} dp {side.dp} (rank {side.dp_rank}) cp {side.cp} "
            f"heads {side.heads} registered {side.cuts} shared {side.shared!r} group order {side.group_order}"
        )
        lines += [f"  group {g}: {storage}" for g, storage in enumerate(side.groups)]
    return "\n".join(lines)
