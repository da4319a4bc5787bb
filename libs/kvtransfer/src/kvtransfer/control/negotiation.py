"""What two hubs agree on before the first request. Pure: two descriptions in, terms or every reason against it out.

capabilities intersect · limits take the minimum · the highest version both speak · features known to both
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.compatibility import check_compatible
from kvtransfer.messages import (
    KNOWN_FEATURES,
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REQUIRE_PATH,
    Capability,
    Hello,
    TransferLimits,
    Welcome,
)
from kvtransfer.peer_plan import build_instance_plans, plan_digest
from kvtransfer.ports import Incompatibility

if TYPE_CHECKING:
    from kvtransfer.config import TransferConfig
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.rank_info import InstanceInfo


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one side speaks."""

    protocol_version: int = PROTOCOL_VERSION
    min_protocol_version: int = MIN_PROTOCOL_VERSION
    capabilities: frozenset[Capability] = frozenset(Capability)
    known_features: frozenset[str] = KNOWN_FEATURES
    required_features: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    """What both sides use. `plans` in order of (src_rank, dst_rank)."""

    protocol_version: int
    capabilities: frozenset[Capability]
    limits: TransferLimits
    peer: InstanceInfo
    plans: tuple[PeerPlan, ...]

    def __str__(self) -> str:
        names = ", ".join(sorted(one.name for one in self.capabilities)) or "none"
        return (
            f"protocol {self.protocol_version}, capabilities {names}, at most {self.limits.max_open_requests} open "
            f"requests of {self.limits.max_block_ids} blocks"
        )


Verdict = Terms | tuple[Incompatibility, ...]


def limits_of(config: TransferConfig) -> TransferLimits:
    """This side's limits."""
    return TransferLimits(config.max_open_requests, config.max_block_ids)


def make_hello(
    local: InstanceInfo, limits: TransferLimits, epoch: int, dialect: Dialect, require_path: str = ""
) -> Hello:
    """First message of the generation side. A path is required with a feature: who does not know it must refuse."""
    features = (*dialect.required_features, *((REQUIRE_PATH,) if require_path else ()))
    return Hello(
        protocol_version=dialect.protocol_version,
        min_protocol_version=dialect.min_protocol_version,
        capabilities=dialect.capabilities,
        limits=limits,
        required_features=features,
        instance=local,
        connection_epoch=epoch,
        require_path=require_path,
    )


def answer_hello(local: InstanceInfo, limits: TransferLimits, hello: Hello, dialect: Dialect) -> Verdict:
    """The context side's view of a Hello: terms, or every reason against it."""
    problems: list[Incompatibility] = []
    version = min(hello.protocol_version, dialect.protocol_version)
    if version < max(hello.min_protocol_version, dialect.min_protocol_version):
        mine = f"{dialect.min_protocol_version} to {dialect.protocol_version}"
        yours = f"{hello.min_protocol_version} to {hello.protocol_version}"
        problems.append(Incompatibility("protocol_version", mine, yours, "run releases that are closer to each other"))
    unknown = [name for name in hello.required_features if name not in dialect.known_features]
    lacking = [name for name in dialect.required_features if name not in hello.required_features]
    for names, mine, yours in ((unknown, "unknown", "required"), (lacking, "required", "not offered")):
        problems += [
            Incompatibility(f"required_features.{name}", mine, yours, "use the same feature set on both sides")
            for name in names
        ]
    problems += check_compatible(local, hello.instance)
    if problems:
        return tuple(problems)
    return Terms(
        protocol_version=version,
        capabilities=hello.capabilities & dialect.capabilities,
        limits=smaller(limits, hello.limits),
        peer=hello.instance,
        plans=build_instance_plans(local, hello.instance),
    )


def make_welcome(local: InstanceInfo, terms: Terms, digest: bytes, epoch: int) -> Welcome:
    """The context side agrees."""
    return Welcome(terms.protocol_version, terms.capabilities, terms.limits, local, digest, epoch)


def check_welcome(hello: Hello, welcome: Welcome) -> Verdict:
    """The generation side's view of the answer to its Hello: the same terms, or every reason against them."""
    problems = list(check_compatible(hello.instance, welcome.instance))
    offered = {
        "protocol_version": (
            f"{hello.min_protocol_version} to {hello.protocol_version}",
            str(welcome.protocol_version),
            hello.min_protocol_version <= welcome.protocol_version <= hello.protocol_version,
        ),
        "capabilities": (
            _names(hello.capabilities),
            _names(welcome.capabilities),
            welcome.capabilities <= hello.capabilities,
        ),
        "limits": (str(hello.limits), str(welcome.limits), smaller(hello.limits, welcome.limits) == welcome.limits),
    }
    for field, (mine, yours, fits) in offered.items():
        if not fits:
            problems.append(Incompatibility(field, mine, yours, "the answer goes beyond the offer; update that side"))
    if not problems:
        digest = plan_digest(welcome.instance, hello.instance)
        if digest != welcome.plan_digest:
            remedy = "the two sides plan differently; run the same release on both"
            problems.append(Incompatibility("plan_digest", digest.hex(), welcome.plan_digest.hex(), remedy))
    if problems:
        return tuple(problems)
    return Terms(
        protocol_version=welcome.protocol_version,
        capabilities=welcome.capabilities,
        limits=welcome.limits,
        peer=welcome.instance,
        plans=build_instance_plans(welcome.instance, hello.instance),
    )


def swapped(incompatibilities: tuple[Incompatibility, ...]) -> tuple[Incompatibility, ...]:
    """The other side's reasons, seen from here."""
    return tuple(Incompatibility(one.field, one.yours, one.mine, one.remedy) for one in incompatibilities)


def smaller(a: TransferLimits, b: TransferLimits) -> TransferLimits:
    """Element by element."""
    return TransferLimits(min(a.max_open_requests, b.max_open_requests), min(a.max_block_ids, b.max_block_ids))


def _names(capabilities: frozenset[Capability]) -> str:
    return ", ".join(sorted(one.name for one in capabilities)) or "none"
