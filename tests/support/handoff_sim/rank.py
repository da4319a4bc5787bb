"""A rank process: the real rank role on a simulated agent, with its two pipes to the hub."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtransfer.transceiver.rank import RankTransceiver

from .bounced import bounce_policy
from .fabric import Port, SimAgent
from .streams import Pipe

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvtransfer.bounce.credits import Credits
    from kvtransfer.bounce_ports import ChunkName
    from kvtransfer.ports import HubToRank, RankToHub

    from .memory import Arena
    from .node import Node

IPC_LATENCY_S = 0.01
POLL_S = 0.05
# Two pages of most shapes: longer prompts leave in several posts.
PIECE_BYTES = 64


class SimRank:
    """Posts and polls while anything is open; does nothing while it is stalled or dead."""

    def __init__(self, node: Node, number: int, arena: Arena) -> None:
        self.node, self.number, self.world = node, number, node.world
        self.port = Port(f"{node.name}:{node.incarnation.hex()[:8]}:{number}", arena, node.pages)
        self.agent = SimAgent(node.fabric, self.port)
        self.commands = Pipe(self.world, self._handle, IPC_LATENCY_S)
        self.events = Pipe(self.world, self._said, IPC_LATENCY_S)
        self.stalled_until = 0.0
        self._stepping = False
        agent: Any = self.agent
        topology = node.shape.topology(number)
        policy = bounce_policy(self.world, self.port)
        self.role = RankTransceiver(
            arena.table, number, topology, agent, self._emit, self._clock, PIECE_BYTES, bouncing=policy
        )
        self.role.start()

    @property
    def alive(self) -> bool:
        """The process is."""
        return self.port.alive

    @property
    def keeps_room(self) -> bool:
        """Chunks that it sends have room in its arena, or wait for it."""
        return not all(room.is_idle for room in self._rooms)

    @property
    def _rooms(self) -> Collection[Credits[tuple[str, bytes], ChunkName]]:
        # Nobody but a test wants to know.
        return self.role._bouncing._rooms.values()  # pyright: ignore[reportPrivateUsage]

    def stall(self, seconds: float) -> None:
        """SIGSTOP: takes no command and says nothing; what it has posted goes on."""
        self.stalled_until = max(self.stalled_until, self.world.now + seconds)
        self.commands.hold(self.stalled_until)

    def die(self) -> None:
        """SIGKILL. What it had posted may land until the fabric has drained."""
        if self.alive:
            self.port.alive = False
            for copy in list(self.port.copies):
                copy.finish()
            self.world.note("rank dies", self.port.name)
            self.world.at(self.node.config.drain_s * 0.999, self.node.fabric.cut, self.port)

    def _clock(self) -> float:
        return self.world.now

    def _emit(self, event: RankToHub) -> None:
        self.events.put(event)

    def _said(self, event: RankToHub) -> None:
        if self.node.alive:
            self.node.core.from_rank(self.number, event, self.world.now)

    def _handle(self, command: HubToRank) -> None:
        if self.alive:
            if self.world.now < self.stalled_until:
                self.world.at(self.stalled_until - self.world.now, self._handle, command)
                return
            self.role.handle(command)
            self._step()

    def _step(self) -> None:
        if not self._stepping:
            self._stepping = True
            self.world.at(max(POLL_S, self.stalled_until - self.world.now), self._poll)

    def _poll(self) -> None:
        self._stepping = False
        if not self.alive:
            return
        if self.world.now < self.stalled_until or self.role.poll():
            self._step()
