"""Who a peer is: topology, agent, model, instance. Frozen values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvtransfer.errors import GeometryError
from kvtransfer.pools import MemoryKind

if TYPE_CHECKING:
    from kvtransfer.page_table import PageTable
    from kvtransfer.pools import RegisteredRegion

INCARNATION_BYTES = 16
# Fields of RankInfo, in their order: regions of a rank beside its cache.
BESIDE = ("scratch", "arena", "host_scratch", "host_arena")


class InstanceRole(Enum):
    """What an instance does with a request. Values are those of `isthmus.v1.InstanceRole`."""

    CONTEXT = 1
    GENERATION = 2
    CONTEXT_AND_GENERATION = 3


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes and coordinates of a rank. tp includes attention dp: tp_size = dp_size * tp_per_dp."""

    pp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    dp_size: int = 1
    pp_rank: int = 0
    tp_rank: int = 0
    cp_rank: int = 0

    def __post_init__(self) -> None:
        for axis in ("pp", "tp", "cp"):
            size: int = getattr(self, f"{axis}_size")
            rank: int = getattr(self, f"{axis}_rank")
            if not 0 < size <= 1 << 16:
                raise GeometryError(f"topology.{axis}_size", size, "must lie in [1, 65536]")
            if not 0 <= rank < size:
                raise GeometryError(f"topology.{axis}_rank", rank, f"must lie in [0, {size})")
        if self.dp_size < 1 or self.tp_size % self.dp_size:
            raise GeometryError("topology.dp_size", self.dp_size, f"must divide tp_size {self.tp_size}")

    @property
    def world_size(self) -> int:
        """Ranks of the instance."""
        return self.pp_size * self.tp_size * self.cp_size

    @property
    def flat_rank(self) -> int:
        """pp_rank * (tp_size * cp_size) + tp_rank * cp_size + cp_rank."""
        return self.pp_rank * (self.tp_size * self.cp_size) + self.tp_rank * self.cp_size + self.cp_rank

    @property
    def tp_per_dp(self) -> int:
        """Tensor-parallel ranks of one attention-dp group."""
        return self.tp_size // self.dp_size

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """(pp, tp, cp, dp) sizes: equal on all ranks of an instance."""
        return self.pp_size, self.tp_size, self.cp_size, self.dp_size


@dataclass(frozen=True, slots=True)
class AgentDescriptor:
    """The transfer agent of a rank as its peers must know it. `metadata` is opaque to all but the same backend."""

    backend: str
    name: str
    metadata: bytes
    epoch: int = 0

    def __post_init__(self) -> None:
        if not self.backend:
            raise GeometryError("agent.backend", "''", "must name the backend")
        if not self.name:
            raise GeometryError("agent.name", "''", "must not be empty")
        if not 0 <= self.epoch < 1 << 32:
            raise GeometryError("agent.epoch", self.epoch, "must lie in [0, 2^32)")


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Everything a peer must know about one rank before the first byte moves. `extra`: as in PageTable.

    `scratch`: memory that holds nothing; peers may write to it at any time to measure the way. `arena`: memory for
    chunks of peers, each written after a Grant; None: this rank takes none. Both lie where the cache does;
    `host_scratch` and `host_arena` are those on the host of a rank whose cache is elsewhere, for peers whose cache is
    not.
    """

    rank: int
    topology: Topology
    page_table: PageTable
    agent: AgentDescriptor
    extra: bytes = b""
    scratch: RegisteredRegion | None = None
    arena: RegisteredRegion | None = None
    host_scratch: RegisteredRegion | None = None
    host_arena: RegisteredRegion | None = None

    def __post_init__(self) -> None:
        if self.rank != self.topology.flat_rank:
            raise GeometryError("rank", self.rank, f"topology says flat rank {self.topology.flat_rank}")
        for name in BESIDE:
            extra: RegisteredRegion | None = getattr(self, name)
            if extra is None:
                continue
            if any(region.overlaps(extra) for region in self.page_table.regions):
                raise GeometryError(f"{name}.base_address", f"{extra.base_address:#x}", "overlaps the cache")
            if name.startswith("host") and extra.memory_kind is not MemoryKind.DRAM:
                raise GeometryError(f"{name}.memory_kind", extra.memory_kind.name, "must be DRAM")

    @property
    def regions(self) -> tuple[RegisteredRegion, ...]:
        """Everything that is registered with the agent."""
        beside: list[RegisteredRegion | None] = [getattr(self, name) for name in BESIDE]
        return (*self.page_table.regions, *(one for one in beside if one is not None))

    def scratch_for(self, peer: MemoryKind) -> RegisteredRegion | None:
        """Where to measure with a peer whose cache lies in that kind of memory: in that kind, or on both hosts."""
        return self.scratch if self.page_table.memory_kind.meets(peer) else self.host_scratch

    def arena_for(self, peer: MemoryKind) -> RegisteredRegion | None:
        """The arena for chunks of a peer whose cache lies in that kind of memory."""
        return self.arena if self.page_table.memory_kind.meets(peer) else self.host_arena


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """Tells two models of the same shape apart. `kv_dtype` as safetensors spells it ("F32", "BF16").

    `quantization` names the scheme of a quantised cache ("" = none), `scale_digest` its scales. A draft model whose
    cache moves too has `draft_digest` over its weights and its own global layer ids, `draft_layers`.
    """

    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    quantization: str = ""
    scale_digest: bytes = b""
    draft_digest: bytes = b""
    draft_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """One instance as its peers know it. `ranks` are complete and in flat order.

    `exited_incarnations`: earlier incarnations on this host of which every process is proven to have exited. `extra`:
    as in PageTable.
    """

    instance_id: str
    incarnation: bytes
    endpoint: str
    role: InstanceRole
    model: ModelFingerprint
    ranks: tuple[RankInfo, ...]
    exited_incarnations: tuple[bytes, ...] = ()
    extra: bytes = b""

    def __post_init__(self) -> None:
        if not self.instance_id:
            raise GeometryError("instance_id", "''", "must not be empty")
        for incarnation in (self.incarnation, *self.exited_incarnations):
            if len(incarnation) != INCARNATION_BYTES:
                raise GeometryError("incarnation", incarnation.hex(), f"must be {INCARNATION_BYTES} bytes")
        if self.incarnation in self.exited_incarnations:
            raise GeometryError("exited_incarnations", self.incarnation.hex(), "names the living incarnation")
        if not self.ranks:
            raise GeometryError("ranks", "()", "an instance needs at least one rank")
        sizes = self.ranks[0].topology.sizes
        if len(self.ranks) != self.ranks[0].topology.world_size:
            raise GeometryError("ranks", len(self.ranks), f"topology says {self.ranks[0].topology.world_size}")
        for index, info in enumerate(self.ranks):
            if info.rank != index:
                raise GeometryError(f"ranks[{index}].rank", info.rank, "ranks must be complete and in flat order")
            if info.topology.sizes != sizes:
                raise GeometryError(f"ranks[{index}].topology", info.topology.sizes, f"rank 0 says {sizes}")
