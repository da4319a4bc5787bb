"""Which source rank must write an atom, straight from the rule: holder number (dp + hash + layer) mod dup."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import xxhash

from kv_oracle.deployment import head_interval, owner_of
from kv_oracle.storage import local_sections

if TYPE_CHECKING:
    from kv_oracle.model import Part, State
    from kv_oracle.request import Case
    from kv_oracle.tables import Instance


class Election:
    """The writers of one case. `seed_compat`: the layer and the hash do not enter."""

    def __init__(self, case: Case, src: Instance, dst: Instance, seed_compat: bool = False) -> None:
        self._case, self._src = case, src
        self._first = dst.deployment.dp_rank
        self._hash = xxhash.xxh3_64_intdigest(dst.info.instance_id.encode())
        self._seed_compat = seed_compat
        self.of_shard = cache(self._of_shard)
        self.of_unit = cache(self._of_unit)

    def of_head(self, g: int, part: Part, layer: int, head: int, token: int) -> int:
        """Flat rank of the writer of one head of one token."""
        deployment = self._src.deployment
        sharding, shard = deployment.groups[g].sharding, -1
        if sharding is not None and deployment.cp > 1:
            shard = owner_of(sharding, deployment.cp, self._case.prompt, token)
        return self.of_shard(part, layer, head, shard)

    def _of_shard(self, part: Part, layer: int, head: int, shard: int) -> int:
        """`shard` -1: every context-parallel rank holds the token."""
        deployment = self._src.deployment
        holding: list[int] = []
        for rank in self._src.holders:
            place = self._src.places[rank]
            heads = range(1)
            if part.heads:
                heads = range(*head_interval(deployment.heads, part.heads, deployment.tp, place.tp))
            if head in heads and shard in (-1, place.cp) and self._has_layer(place.stage, layer):
                holding.append(rank)
        return self._elect(holding, layer)

    def _of_unit(self, state: State, layer: int, section: int, unit: int) -> int:
        """Flat rank of the writer of one unit of a section."""
        deployment = self._src.deployment
        holding: list[int] = []
        for rank in self._src.holders:
            place = self._src.places[rank]
            _, begin, end = local_sections(state, deployment.heads, deployment.tp, place.tp)[section]
            if begin <= unit < end and self._has_layer(place.stage, layer):
                holding.append(rank)
        return self._elect(holding, layer)

    def _has_layer(self, stage: int, layer: int) -> bool:
        return layer in self._src.deployment.stage_layers(self._case.model, stage)

    def _elect(self, holding: list[int], layer: int) -> int:
        number = self._first if self._seed_compat else self._first + self._hash + layer
        return sorted(holding)[number % len(holding)]
