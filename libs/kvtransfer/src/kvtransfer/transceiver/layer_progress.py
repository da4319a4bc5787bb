"""How far a step of the model is: which layers have their KV in memory, so that they may be sent while others compute.

    model's thread   begin ─▶ done(layer, event) … ─▶ end          agent's thread   reached(step, layer)?

Every rank of an instance computes the same steps in the same order, so a number names a step on all of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

# More than any model has: everything of a step.
ALL_LAYERS = 1 << 31


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """True once it has been reached. Never waits."""
        ...


@dataclass(slots=True)
class _Step:
    number: int
    layers: deque[tuple[int, Event | None]] = field(default_factory=deque[tuple[int, "Event | None"]])
    reached: int = 0
    over: bool = False


class LayerProgress:
    """Written by one thread, read by one other."""

    def __init__(self) -> None:
        self._step = _Step(0, over=True)

    @property
    def next_step(self) -> int:
        """Number of the step that begins next."""
        return self._step.number + 1

    def begin(self) -> None:
        """The next step begins; the one before is over."""
        self._step = _Step(self._step.number + 1)

    def done(self, layer_end: int, event: Event | None = None) -> None:
        """KV of all layers of this rank below global layer `layer_end` is written, on a device when `event` is
        reached. In order of the layers."""
        self._step.layers.append((layer_end, event))

    def end(self) -> None:
        """Everything of the step is in memory."""
        self._step.over = True

    def reached(self, step: int, layer_end: int) -> bool:
        """True when the host has seen that the layers below `layer_end` of that step, or of an earlier one, are there.
        For the thread that posts."""
        now = self._step
        if now.number != step or now.over:
            return step <= now.number
        while now.layers and (now.layers[0][1] is None or now.layers[0][1].query()):
            now.reached = now.layers.popleft()[0]
        return layer_end <= now.reached
