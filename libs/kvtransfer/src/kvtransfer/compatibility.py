"""Can two instances work together? Every reason against it, with both values, before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.pool_matching import match_pools
from kvtransfer.ports import Incompatibility
from kvtransfer.rank_info import InstanceRole
from kvtransfer.storage_check import check_instances

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.rank_info import InstanceInfo, ModelFingerprint, RankInfo


def check_compatible(local: InstanceInfo, peer: InstanceInfo) -> list[Incompatibility]:
    """Empty: the pair works. Symmetric but for the sides of `mine` and `yours`. Fields that name a rank mean one of
    the context side, unless they speak of what nobody there holds."""
    problems = _check_roles(local.role, peer.role)
    problems += _check_models(local.model, peer.model)
    problems += _check_backends(local.ranks, peer.ranks)
    if local.role is InstanceRole.GENERATION:
        return problems + [_turned(one) for one in check_instances(peer.ranks, local.ranks)]
    return problems + list(check_instances(local.ranks, peer.ranks))


def check_rank(mine: RankInfo, peer: InstanceInfo, context: Sequence[RankInfo] = ()) -> list[Incompatibility]:
    """What one context rank can see for itself: storage and backend. `context`: all ranks of its instance; empty = it
    is the only one."""
    ranks = context or (mine,)
    return _check_backends((mine,), peer.ranks) + list(check_instances(ranks, peer.ranks))


def check_storage(mine: RankInfo, yours: RankInfo) -> list[Incompatibility]:
    """One pair of ranks alone: what stands in the way of writes from one to the other."""
    where = f"ranks[{mine.rank}]"
    problems = list(match_pools(mine.page_table, yours.page_table, f"{where}.page_table").incompatibilities)
    return problems + _check_backends((mine,), (yours,))


def _turned(one: Incompatibility) -> Incompatibility:
    return Incompatibility(one.field, one.yours, one.mine, one.remedy)


def _check_backends(mine: Sequence[RankInfo], yours: Sequence[RankInfo]) -> list[Incompatibility]:
    """Every rank that writes must speak the language of every rank that is written to."""
    theirs = sorted({info.agent.backend for info in yours})
    remedy = "set the same transfer.backend on both sides"
    return [
        Incompatibility(f"ranks[{info.rank}].agent.backend", info.agent.backend, ", ".join(theirs), remedy)
        for info in mine
        if theirs != [info.agent.backend]
    ]


def _check_roles(mine: InstanceRole, yours: InstanceRole) -> list[Incompatibility]:
    if {mine, yours} == {InstanceRole.CONTEXT, InstanceRole.GENERATION}:
        return []
    remedy = "a hand-off goes from a CONTEXT to a GENERATION instance"
    return [Incompatibility("role", mine.name, yours.name, remedy)]


def _check_models(mine: ModelFingerprint, yours: ModelFingerprint) -> list[Incompatibility]:
    same = "load the same weights on both sides"
    draft = "use the same draft model on both sides"
    checks = (
        ("weights_digest", mine.weights_digest.hex(), yours.weights_digest.hex(), same),
        (
            "attention_digest",
            mine.attention_digest.hex(),
            yours.attention_digest.hex(),
            "use the same rope and attention configuration on both sides",
        ),
        ("kv_dtype", mine.kv_dtype, yours.kv_dtype, "use the same KV dtype on both sides"),
        ("quantization", mine.quantization, yours.quantization, "use the same KV quantisation on both sides"),
        ("scale_digest", mine.scale_digest.hex(), yours.scale_digest.hex(), "use the same KV scales on both sides"),
        ("draft_digest", mine.draft_digest.hex(), yours.draft_digest.hex(), draft),
        ("draft_layers", str(list(mine.draft_layers)), str(list(yours.draft_layers)), draft),
    )
    return [
        Incompatibility(f"model.{name}", a or "none", b or "none", remedy) for name, a, b, remedy in checks if a != b
    ]
