"""What hand-offs from this instance to each generation instance are expected to take, for whoever places requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.dry_run import dry_run

if TYPE_CHECKING:
    from kvtransfer.control.negotiation import Terms
    from kvtransfer.dry_run import Measured
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.session.actions import PeerId

# Prompts of these lengths are planned; what lies between and beyond is a straight line.
_SHORT, _LONG = 256, 4096


@dataclass(frozen=True, slots=True)
class PairEstimate:
    """Seconds of a hand-off to a start of a generation instance: `fixed_s` + `s_per_token` * tokens moved."""

    instance_id: str
    incarnation: bytes
    fixed_s: float
    s_per_token: float
    path: str


def pair_estimate(local: InstanceInfo, peer: InstanceInfo, measured: Measured) -> PairEstimate | None:
    """By the plans of a short and of a long prompt; None unless every pair of ranks was measured. Pure."""
    short, long = dry_run(local, peer, _SHORT, measured), dry_run(local, peer, _LONG, measured)
    if short.expected is None or long.expected is None:
        return None
    per_token = max(0.0, (long.expected - short.expected) / (_LONG - _SHORT))
    fixed = max(0.0, short.expected - per_token * _SHORT)
    paths = sorted({write.path for write in long.writes})
    return PairEstimate(peer.instance_id, peer.incarnation, fixed, per_token, ", ".join(paths))


class Estimates:
    """Makes them beside the event loop whenever a measurement has come in. `say` gets each."""

    def __init__(self, say: Callable[[PairEstimate], None]) -> None:
        self._say = say
        self._measured: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def measured(self, instance_id: str) -> None:
        """The way to this instance was measured; its stream may not be ready yet."""
        self._measured.add(instance_id)

    def look(self, local: InstanceInfo, terms: dict[PeerId, Terms], last: Callable[[str], Measured]) -> None:
        """Begin what can be made now: `terms` of ready streams, `last(instance_id)` its measurements."""
        for (instance_id, _), one in terms.items():
            if instance_id in self._measured:
                self._measured.discard(instance_id)
                task = asyncio.create_task(self._make(local, one.peer, last(instance_id)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _make(self, local: InstanceInfo, peer: InstanceInfo, measured: Measured) -> None:
        estimate = await asyncio.to_thread(pair_estimate, local, peer, measured)
        if estimate is not None:
            self._say(estimate)

    async def close(self) -> None:
        """Nothing is said any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
