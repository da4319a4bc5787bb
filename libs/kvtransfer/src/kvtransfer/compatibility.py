"""Can two instances work together? Every reason against it, with both values, before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.overlap import destination_ranks
from kvtransfer.pool_matching import match_pools
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import InstanceRole

if TYPE_CHECKING:
    from kvtransfer.rank_info import InstanceInfo, ModelFingerprint, RankInfo, Topology


def check_compatible(local: InstanceInfo, peer: InstanceInfo) -> list[Incompatibility]:
    """Empty: the pair works. Symmetric but for the sides of `mine` and `yours`."""
    problems = _check_roles(local.role, peer.role)
    problems += _check_models(local.model, peer.model)
    topology = _check_topologies(local.ranks[0].topology, peer.ranks[0].topology)
    problems += topology
    if not topology:
        for mine in local.ranks:
            for rank in destination_ranks(mine.topology, peer.ranks[0].topology):
                problems += check_storage(mine, peer.ranks[rank])
    return problems


def check_rank(mine: RankInfo, peer: InstanceInfo) -> list[Incompatibility]:
    """What one rank can see for itself: topology, storage and backend of the ranks it would write to."""
    topology = _check_topologies(mine.topology, peer.ranks[0].topology)
    if topology:
        return topology
    problems: list[Incompatibility] = []
    for rank in destination_ranks(mine.topology, peer.ranks[0].topology):
        problems += check_storage(mine, peer.ranks[rank])
    return problems


def check_storage(mine: RankInfo, yours: RankInfo) -> list[Incompatibility]:
    """One pair of ranks of which one writes to the other."""
    where = f"ranks[{mine.rank}]"
    problems = list(match_pools(mine.page_table, yours.page_table, f"{where}.page_table").incompatibilities)
    if mine.agent.backend != yours.agent.backend:
        remedy = "set the same transfer.backend on both sides"
        problems.append(Incompatibility(f"{where}.agent.backend", mine.agent.backend, yours.agent.backend, remedy))
    return problems


def _check_roles(mine: InstanceRole, yours: InstanceRole) -> list[Incompatibility]:
    if {mine, yours} == {InstanceRole.CONTEXT, InstanceRole.GENERATION}:
        return []
    remedy = "a hand-off goes from a CONTEXT to a GENERATION instance"
    return [Incompatibility("role", mine.name, yours.name, remedy)]


def _check_models(mine: ModelFingerprint, yours: ModelFingerprint) -> list[Incompatibility]:
    checks = (
        (
            "weights_digest",
            mine.weights_digest.hex(),
            yours.weights_digest.hex(),
            "load the same weights on both sides",
        ),
        (
            "attention_digest",
            mine.attention_digest.hex(),
            yours.attention_digest.hex(),
            "use the same rope and attention configuration on both sides",
        ),
        ("kv_dtype", mine.kv_dtype, yours.kv_dtype, "use the same KV dtype on both sides"),
    )
    return [Incompatibility(f"model.{name}", a, b, remedy) for name, a, b, remedy in checks if a != b]


def _check_topologies(mine: Topology, yours: Topology) -> list[Incompatibility]:
    return [
        Incompatibility(f"topology.{name}_size", str(a), str(b), f"use the same {name} size on both sides")
        for name, a, b in zip(("pp", "tp", "cp", "dp"), mine.sizes, yours.sizes, strict=True)
        if a != b
    ]
