"""What the transfer can be told. Frozen; the worker maps its own configuration onto it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvtransfer.errors import TransferConfigError


class OnFailure(Enum):
    """What becomes of a request whose hand-off has failed for good."""

    RECOMPUTE = "recompute"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class TransferConfig:
    """Durations in seconds. Raises TransferConfigError naming the field.

    backend             registry name of the transfer agent; no default: a path nobody chose may be 1000 times slower
    timeout_s           receive: KvRequest sent until the manifest must be complete
    handoff_hold_s      context: how long offered pages wait for somebody to ask for them
    drain_s             measured drain time of the fabric: after a writer's exit report nothing lands later than this
    in_doubt_s          a failed receive waits this long for its writers before their hub is asked to kill them
    fence_writer        ask the hub of silent writers to kill them; without it their pages leak at once
    leak_budget_bytes   pages of writers that can not be reached may hold this much; beyond it the instance stops
    max_held_requests   context: offers that may wait for somebody to ask for them
    max_held_share      context: share of the pages that such offers may hold
    on_failure          generation, after a failed hand-off and one retry: compute the prompt there, or fail
    max_peers           generation: streams to context instances that are kept open
    ping_s              quiet time after which a stream is probed; three silent probes make it suspect
    max_open_requests   attempts one peer may have open at once (the smaller of both sides counts)
    max_block_ids       block ids in one KvRequest (the smaller of both sides counts)
    bounce_unit_bytes   generation: room for chunks that every peer is sure of in the arena of a rank
    require_path        generation: words the name of the way must contain; the context side measures it; "" = any way
    max_finished        finished attempts a context hub remembers, so that cancels and Reconcile get the recorded answer
    """

    backend: str
    timeout_s: float = 30.0
    handoff_hold_s: float = 30.0
    drain_s: float = 0.2
    in_doubt_s: float = 10.0
    fence_writer: bool = True
    leak_budget_bytes: int = 1 << 30
    max_held_requests: int = 256
    max_held_share: float = 0.5
    on_failure: OnFailure = OnFailure.RECOMPUTE
    max_peers: int = 64
    ping_s: float = 5.0
    max_open_requests: int = 1024
    max_block_ids: int = 1 << 18
    max_finished: int = 4096
    require_path: str = ""
    bounce_unit_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not self.backend:
            raise TransferConfigError("backend", self.backend, 'name one, for example "nixl"')
        for name in ("timeout_s", "handoff_hold_s", "in_doubt_s", "ping_s"):
            seconds: float = getattr(self, name)
            if not 0 < seconds <= 86400:
                raise TransferConfigError(name, seconds, "must be above 0 and at most 86400 seconds")
        if not 0 <= self.drain_s <= 60:
            raise TransferConfigError("drain_s", self.drain_s, "must lie in [0, 60] seconds")
        if self.leak_budget_bytes < 0:
            raise TransferConfigError("leak_budget_bytes", self.leak_budget_bytes, "must not be negative")
        if not 0 < self.max_held_share <= 1:
            raise TransferConfigError("max_held_share", self.max_held_share, "must lie in (0, 1]")
        for name in (
            "max_held_requests",
            "max_peers",
            "max_open_requests",
            "max_block_ids",
            "max_finished",
            "bounce_unit_bytes",
        ):
            number: int = getattr(self, name)
            if not 0 < number < 1 << 31:
                raise TransferConfigError(name, number, "must lie in [1, 2^31)")
