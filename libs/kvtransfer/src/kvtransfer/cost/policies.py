"""Direct or bounced, and why: by the cost model, or by a fixed gate to compare with or to force."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvtransfer.cost.model import ChunkLimits as ChunkLimits
from kvtransfer.cost.model import best_bounced, direct_s

if TYPE_CHECKING:
    from kvtransfer.cost.model import PathCost, Shape


class StagingPolicy(Enum):
    """Who decides. The gates are those of other systems: destination blocks, bytes, many small descriptors."""

    COST = "cost"
    BLOCKS_96 = "blocks_96"
    BYTES_2MIB = "bytes_2mib"
    SMALL_DESCRIPTORS = "small_descriptors"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Decision:
    """`depth`: chunks at once. `predicted`: seconds until the writer is done, the way it was decided; `direct` and
    `bounced`: seconds until the cache is there, either way. `why` in a few words."""

    bounce: bool
    chunk_bytes: int
    depth: int
    predicted: float
    direct: float
    bounced: float
    why: str


def decide(policy: StagingPolicy, cost: PathCost, shape: Shape, limits: ChunkLimits) -> Decision:
    """Raises nothing: every shape has an answer."""
    written = direct_s(cost, shape)
    # The peer has to hear that it is over: half of what asking for room and being told takes.
    direct = written + cost.credit_s / 2
    best = best_bounced(cost, shape, limits)
    match policy:
        case StagingPolicy.COST:
            bounce = best.total_s < direct
            why = f"expected {best.total_s * 1e3:.2f} ms bounced, {direct * 1e3:.2f} ms direct"
        case StagingPolicy.BLOCKS_96:
            bounce, why = shape.blocks >= 96, f"{shape.blocks} blocks, the gate is 96"
        case StagingPolicy.BYTES_2MIB:
            bounce, why = shape.nbytes >= 2 << 20, f"{shape.nbytes} bytes, the gate is 2 MiB"
        case StagingPolicy.SMALL_DESCRIPTORS:
            mean = shape.nbytes / max(1, shape.descriptors)
            bounce = shape.descriptors >= 1024 and mean <= 16 << 10
            why = f"{shape.descriptors} descriptors of {mean:.0f} bytes, the gate is 1024 of at most 16 KiB"
        case StagingPolicy.ALWAYS | StagingPolicy.NEVER:
            bounce, why = policy is StagingPolicy.ALWAYS, f"transfer.staging_policy = {policy.value}"
    bounce = bounce and shape.nbytes > 0
    predicted = best.writer_s if bounce else written
    return Decision(bounce, best.chunk_bytes, best.depth, predicted, direct, best.total_s, why)
