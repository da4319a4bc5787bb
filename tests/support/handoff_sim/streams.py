"""The control plane: FIFO pipes with latency, and Connect streams made of two of them."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

from kvtransfer.errors import ProtocolError
from kvtransfer.messages import Envelope

from .codec import through_wire
from .violation import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtransfer.messages import PeerBody
    from kvtransfer.session.actions import PeerId

    from .clock import World
    from .node import Node

CONTROL_LATENCY_S = 0.04
# Now and then nothing tells a side that the other is gone; then it learns after this time at most.
HALF_OPEN_S = 3.0
# Between two arrivals on one pipe: far more than what adding times up loses, so that the order is that of sending.
ORDER_S = 1e-9


class Pipe:
    """A FIFO with latency. `cut` drops what has not arrived, `hold` lets nothing arrive before a time."""

    def __init__(self, world: World, arrive: Callable[[Any], None], longest: float = CONTROL_LATENCY_S) -> None:
        self._world, self._arrive, self._longest = world, arrive, longest
        self._last, self._open = 0.0, True

    def put(self, item: object) -> None:
        """Sends."""
        world = self._world
        self._last = max(self._last + ORDER_S, world.now + world.latency(self._longest))
        world.at(self._last - world.now, self._deliver, through_wire(item) if world.wire else item)

    def hold(self, until: float) -> None:
        """For what is put from now on."""
        self._last = max(self._last, until)

    def cut(self) -> None:
        """For ever."""
        self._open = False

    def _deliver(self, item: object) -> None:
        if self._open:
            self._arrive(item)


class Connection:
    """One Connect stream. What is said at once leaves in one envelope."""

    numbers = count(1)

    def __init__(self, generation: Node, peer: PeerId, context: Node) -> None:
        self.generation, self.peer, self.context = generation, peer, context
        self.world: World = generation.world
        self.number = next(self.numbers)
        self.there, self.back = Pipe(self.world, self._to_context), Pipe(self.world, self._to_generation)
        self._there: list[PeerBody] = []
        self._back: list[PeerBody] = []
        # Whom they are meant for: known when they are said, as in the product's outbox; the core may have forgotten the
        # stream when they leave.
        self._to_context_of = self._to_generation_of = b""
        self.open = True
        # Since when the generation side uses it.
        self.ready_at: float | None = None
        context.streams[self.number] = self
        context.core.context.opened(self.number, self.world.now)

    def say_there(self, body: PeerBody) -> None:
        """Generation to context."""
        self._to_context_of = self.generation.core.generation.speaks_to(self.peer)
        self._there.append(body)
        if len(self._there) == 1:
            self.world.at(0.0, self._flush_there)

    def say_back(self, body: PeerBody) -> None:
        """Context to generation."""
        self._to_generation_of = self.context.core.context.speaks_to(self.number) or self.generation.incarnation
        self._back.append(body)
        if len(self._back) == 1:
            self.world.at(0.0, self._flush_back)

    def end(self) -> None:
        """Ends for both, each learns of it in its own time. What is on its way is lost, or still arrives at a side
        that has not learned of it."""
        if not self.open:
            return
        self.open = False
        self._flush_there()
        self._flush_back()
        random = self.world.random
        for pipe in (self.there, self.back):
            if random.random() < 0.5:
                pipe.cut()
        for seen_by in (self._context_sees, self._generation_sees):
            self.world.at(random.random() * (HALF_OPEN_S if random.random() < 0.2 else 0.4), seen_by)

    def replace(self) -> None:
        """The generation side opens another stream; the context side has not noticed that this one is over."""
        if self.open:
            self.open = False
            self._generation_sees(at_once=True)
            self.world.at(self.world.random.random() * HALF_OPEN_S, self._context_sees)

    def _flush_there(self) -> None:
        if self._there and self.generation.alive:
            self.there.put(Envelope(self.generation.incarnation, self._to_context_of, tuple(self._there)))
        self._there = []

    def _flush_back(self) -> None:
        if self._back and self.context.alive:
            self.back.put(Envelope(self.context.incarnation, self._to_generation_of, tuple(self._back)))
        self._back = []

    def _to_context(self, envelope: Envelope) -> None:
        node = self.context
        if not node.alive or self.number not in node.streams:
            return
        try:
            node.core.context.envelope(self.number, envelope, self.world.now)
        except ProtocolError as error:
            raise Violation(f"{node.name} was told nonsense: {error}") from error
        node.core.settle_lost(self.world.now)

    def _to_generation(self, envelope: Envelope) -> None:
        node = self.generation
        if not node.alive or node.links.get(self.peer) is not self:
            return
        try:
            node.core.generation.envelope(self.peer, envelope, self.world.now)
        except ProtocolError as error:
            raise Violation(f"{node.name} was told nonsense: {error}") from error
        if self.ready_at is None and node.core.generation.is_ready(self.peer):
            self.ready_at = self.world.now

    def _context_sees(self) -> None:
        self.there.cut()
        self.context.streams.pop(self.number, None)
        if self.context.alive:
            self.context.core.context.closed(self.number, self.world.now)

    def _generation_sees(self, *, at_once: bool = False) -> None:
        self.back.cut()
        node = self.generation
        if node.links.get(self.peer) is self:
            node.links[self.peer] = None
            if node.alive:
                node.core.generation.closed(self.peer, self.world.now)
                self.world.at(0.0 if at_once else self.world.random.random() * 0.3, node.connect, self.peer)
