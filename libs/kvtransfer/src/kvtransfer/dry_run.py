"""What a hand-off between two instances would be: a plan that nobody carries out. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.compatibility import check_compatible
from kvtransfer.cost.book import DEVICE, HOST, CostBook
from kvtransfer.cost.model import Shape
from kvtransfer.cost.policies import ChunkLimits, StagingPolicy, decide
from kvtransfer.explain import explain, planned_transfer
from kvtransfer.peer_plan import build_instance_plans
from kvtransfer.pools import MemoryKind
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceRole
from kvtransfer.windows import Chunk

if TYPE_CHECKING:
    from kvtransfer.cost.policies import Decision
    from kvtransfer.pools import RegisteredRegion
    from kvtransfer.ports import Incompatibility
    from kvtransfer.probe_ports import PairProbe
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.transfer import Transfer

# The defaults of the two sides.
SMALLEST_CHUNK, CHUNKS_AT_ONCE = 1 << 20, 3
# By (src_rank, dst_rank); None: not measured.
Measured = Callable[[int, int], "PairProbe | None"]


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """What one context rank would write to one generation rank. `path` and `expected` (seconds) by the last probe."""

    src_rank: int
    dst_rank: int
    bytes: int
    fragments: int
    path: str = ""
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class DryRun:
    """`incompatibilities` is empty when the pair works. `explanation` is for people."""

    context_id: str
    generation_id: str
    incompatibilities: tuple[Incompatibility, ...]
    writes: tuple[PlannedWrite, ...]
    explanation: str

    @property
    def expected(self) -> float | None:
        """Seconds of the slowest writer (they work at the same time); None unless every pair was measured."""
        known = [write.expected for write in self.writes if write.expected is not None]
        return max(known) if known and len(known) == len(self.writes) else None


def dry_run(local: InstanceInfo, peer: InstanceInfo, prompt_tokens: int, measured: Measured) -> DryRun:
    """The hand-off of a prompt between the two, whichever of them is the context instance; neither: `local` is taken
    for it, and the roles are among the reasons against it."""
    swap = local.role is InstanceRole.GENERATION or (
        local.role is not InstanceRole.CONTEXT and peer.role is InstanceRole.CONTEXT
    )
    context, generation = (peer, local) if swap else (local, peer)
    problems = tuple(check_compatible(local, peer))
    tokens = TokenRange(0, prompt_tokens)
    if problems:
        text = "\n".join(("can not work together:", *(f"  {one}" for one in problems)))
        return DryRun(context.instance_id, generation.instance_id, problems, (), text)
    writes, ways = list[PlannedWrite](), list[str]()
    for plan in build_instance_plans(context, generation):
        transfer = planned_transfer(plan, Chunk.of(tokens))
        probe = measured(plan.src_rank, plan.dst_rank)
        path = "" if probe is None else probe.path
        expected = None if probe is None else probe.expected(transfer.nbytes, transfer.fragments)
        mine, theirs = (table.memory_kind for table in plan.tables)
        arena, pair = generation.ranks[plan.dst_rank].arena_for(mine), f"rank {plan.src_rank} -> rank {plan.dst_rank}"
        if mine is not theirs:
            ways.append(f"{pair}: {_across_text(mine, theirs, arena)}")
        if probe is not None and expected is not None and arena is not None:
            decision = _decision(transfer, probe, arena, StagingPolicy.COST if mine is theirs else StagingPolicy.ALWAYS)
            expected = decision.bounced if decision.bounce else decision.direct
            ways.append(f"{pair}: {_way_text(decision)}")
        writes.append(PlannedWrite(plan.src_rank, plan.dst_rank, transfer.nbytes, transfer.fragments, path, expected))
    text = "\n".join([explain(context, generation, tokens), *ways])
    return DryRun(context.instance_id, generation.instance_id, (), tuple(writes), text)


def _across_text(mine: MemoryKind, theirs: MemoryKind, arena: RegisteredRegion | None) -> str:
    way = (
        "through host memory on both sides"
        if arena is not None
        else "directly, hundreds of times slower: no host arena"
    )
    return f"from a cache in {mine.name} to one in {theirs.name}: {way}"


def _decision(transfer: Transfer, probe: PairProbe, arena: RegisteredRegion, policy: StagingPolicy) -> Decision:
    """What the cost model says by the last probe; the copies of the ranks are assumed, only they have measured them."""
    device = arena.memory_kind is MemoryKind.VRAM
    book = CostBook(DEVICE if device else HOST)
    book.probed(probe)
    shape = Shape(transfer.nbytes, transfer.fragments, transfer.fragments, 0)
    limits = ChunkLimits(SMALLEST_CHUNK, max(SMALLEST_CHUNK, arena.size_bytes // 2), arena.size_bytes, CHUNKS_AT_ONCE)
    return decide(policy, book.cost(probe.path), shape, limits)


def _way_text(decision: Decision) -> str:
    way = f"in chunks of {decision.chunk_bytes >> 20} MiB" if decision.bounce else "directly"
    return f"{way} ({decision.why})"
