"""What the two ends say before they speak the hand-off: frozen values. Protobuf twins in `transfer_local.proto`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.ports import Holder
    from kvtransfer.rank_info import InstanceRole, ModelFingerprint

LOCAL_VERSION = 1


@dataclass(frozen=True, slots=True)
class LocalScheduler:
    """What the scheduler of an engine knows about it."""

    model: ModelFingerprint
    tokens_per_block: int
    total_blocks: int
    max_model_len: int
    vocab_size: int
    engine: str


@dataclass(frozen=True, slots=True)
class LocalHello:
    """First message of a process: the scheduler's facts, or a flat rank in [0, world_size)."""

    world_size: int
    who: LocalScheduler | int


@dataclass(frozen=True, slots=True)
class LocalWelcome:
    """The hub's answer: the identity of the instance, and what the roles have to know.

    `max_held_share`: of the blocks, for finished prefills that wait. `recompute`: what becomes of a prompt whose cache
    did not come. `probe`, `require_path`: see `transceiver.probing.ProbePolicy`. `max_peers`: see `BounceSettings`.
    """

    here: Holder
    role: InstanceRole
    backend: str
    max_held_requests: int = 256
    max_held_share: float = 0.5
    recompute: bool = True
    probe: bool = False
    require_path: str = ""
    max_peers: int = 64
