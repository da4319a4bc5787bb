"""One write whose layers are posted as they are computed: a `PiecedWrite` for every slice of layers, in order.

slice 0 ── its layers are there ──▶ posted ─▶ slice 1 …          a slice that waits keeps no other write from going on
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.agents.base import WriteState, WriteStatus
from kvtransfer.group_plan import BufferSource
from kvtransfer.transceiver.parts import SLICES, layer_slices_of

if TYPE_CHECKING:
    from kvtransfer.group_plan import GroupPlan
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.transceiver.pieced_write import PiecedWrite


class LayeredWrite:
    """Not thread-safe; looks like a `PiecedWrite`. `parts`: global layers below which everything must be there, in
    order, and the write of what lies there. `reached`: whether it is."""

    def __init__(self, parts: list[tuple[int, PiecedWrite]], reached: Callable[[int], bool]) -> None:
        self._waiting, self._reached = parts, reached
        self._begun: list[PiecedWrite] = []
        self._failure = ""

    @property
    def can_post(self) -> bool:
        """True when something waits and may go."""
        while self._waiting and self._reached(self._waiting[0][0]):
            self._begun.append(self._waiting.pop(0)[1])
        return any(one.can_post for one in self._begun)

    def post(self) -> None:
        """Posts the next piece. Raises AgentError when nothing of it was posted: the rest is dropped then."""
        next(one for one in self._begun if one.can_post).post()

    def cancel(self, reason: str) -> None:
        """Posts no more. If everything has been posted, it goes on."""
        for one in self._begun:
            one.cancel(reason)
        if self._waiting:
            self._drop(reason)

    def look(self) -> WriteStatus:
        """Makes progress. DONE: every byte has arrived. FAILED: not every byte, and nothing is in flight any more."""
        states = [one.look() for one in self._begun]
        failed = [one for one in states if one.state is WriteState.FAILED]
        if failed:
            self._drop(failed[0].reason)
            for one in self._begun:
                one.cancel(failed[0].reason)
        if self._waiting or any(one.state is WriteState.IN_FLIGHT for one in states):
            return WriteStatus(WriteState.IN_FLIGHT)
        if self._failure:
            return WriteStatus(WriteState.FAILED, self._failure, any(one.peer_lost for one in failed))
        return WriteStatus(WriteState.DONE)

    def _drop(self, reason: str) -> None:
        self._waiting.clear()
        self._failure = self._failure or reason or "the agent gives no reason"


def layer_slices(plan: PeerPlan, most: int = SLICES) -> tuple[tuple[int, PeerPlan], ...]:
    """The plan in at most `most` parts of equally many layers: (one past its last global layer, the part), in order."""
    layers = np.concatenate([_layers(group) for group in plan.groups])
    slices: list[tuple[int, PeerPlan]] = []
    for part in layer_slices_of(layers, most):
        low, high = int(part[0]), int(part[-1])
        groups = tuple(one for group in plan.groups if (one := _only(group, low, high)) is not None)
        slices.append((high + 1, replace(plan, groups=groups)))
    return tuple(slices)


def _layers(group: GroupPlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Global layer of each atom."""
    source = group.source
    return np.asarray(source.relation.dst.layer[source.atoms.dst_row], np.int64)


def _only(group: GroupPlan, low: int, high: int) -> GroupPlan | None:
    layers = _layers(group)
    chosen = np.flatnonzero((layers >= low) & (layers <= high))
    if not len(chosen):
        return None
    source = group.source
    return replace(group, source=BufferSource(source.relation, source.atoms.take(chosen), source.tables))
