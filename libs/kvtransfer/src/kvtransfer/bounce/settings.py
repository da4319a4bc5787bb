"""What can be said about the chunks of a rank, by the names of section `transfer` of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvtransfer.bounce.arena import check_room
from kvtransfer.bounce.policy import CHUNK_BYTES, DEPTH, UNIT_BYTES
from kvtransfer.cost.policies import StagingPolicy
from kvtransfer.errors import ArenaError

if TYPE_CHECKING:
    from collections.abc import Mapping

_MOST_BYTES, _MOST_DEPTH = 1 << 40, 64


@dataclass(frozen=True, slots=True)
class BounceSettings:
    """Raises ArenaError for sizes that can not work.

    max_peers           every arena has room for at least one chunk of each of them
    staging_policy      who decides that small runs are gathered
    arena_bytes         of each arena; None: as the peers and the memory want it; 0: small runs are never gathered
    bounce_chunk_bytes  the largest chunk
    bounce_depth        chunks of one transfer that are under way at once
    cost_file           where measured costs are kept between starts
    """

    max_peers: int
    staging_policy: StagingPolicy = StagingPolicy.COST
    arena_bytes: int | None = None
    bounce_chunk_bytes: int = CHUNK_BYTES
    bounce_depth: int = DEPTH
    cost_file: str | None = None

    def __post_init__(self) -> None:
        if self.arena_bytes:
            check_room("an arena", self.arena_bytes, UNIT_BYTES, self.max_peers)

    @classmethod
    def from_words(cls, words: Mapping[str, Any], max_peers: int, where: str) -> BounceSettings:
        """From a mapping that may hold other keys too, for example vLLM's `kv_connector_extra_config` (`where`). Raises
        ArenaError naming the key, its value and what to write."""
        policy = words.get("staging_policy", StagingPolicy.COST.value)
        if policy not in [one.value for one in StagingPolicy]:
            known = ", ".join(one.value for one in StagingPolicy)
            raise ArenaError(f"{where}.staging_policy = {policy!r}: write one of {known}")
        cost_file = words.get("cost_file")
        if not isinstance(cost_file, str | None) or cost_file == "":
            raise ArenaError(f"{where}.cost_file = {cost_file!r}: write the name of a file")
        number = partial(_number, words, where)
        return cls(
            max_peers,
            StagingPolicy(policy),
            None if words.get("arena_bytes") is None else number("arena_bytes", 0, 0, _MOST_BYTES),
            number("bounce_chunk_bytes", CHUNK_BYTES, UNIT_BYTES, _MOST_BYTES),
            number("bounce_depth", DEPTH, 1, _MOST_DEPTH),
            cost_file,
        )

    @property
    def words(self) -> dict[str, Any]:
        """What `from_words` reads, without `max_peers`."""
        return {
            "staging_policy": self.staging_policy.value,
            "arena_bytes": self.arena_bytes,
            "bounce_chunk_bytes": self.bounce_chunk_bytes,
            "bounce_depth": self.bounce_depth,
            "cost_file": self.cost_file,
        }


def _number(words: Mapping[str, Any], where: str, key: str, default: int, least: int, most: int) -> int:
    value: object = words.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ArenaError(f"{where}.{key} = {value!r}: write a whole number from {least} to {most}")
    return value
