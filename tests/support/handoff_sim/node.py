"""One instance: the real hub core and scheduler role, its ranks, and what a driver would do for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from kvtransfer.hub.core import HubCore
from kvtransfer.rank_info import InstanceInfo, InstanceRole, ModelFingerprint
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

from .memory import arenas
from .pages import Pages
from .rank import IPC_LATENCY_S, SimRank
from .streams import Connection, Pipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvtransfer.config import TransferConfig
    from kvtransfer.control.generation import PairStatus, PeerAddress
    from kvtransfer.messages import FenceAnswer, FenceWriter, PeerBody
    from kvtransfer.ports import HubToRank, HubToScheduler, SchedulerToHub
    from kvtransfer.session.actions import EndReason, PeerId
    from kvtransfer.transceiver.policy import HandoffPolicy

    from .agreeing import Agreeing
    from .clock import World
    from .fabric import Fabric
    from .shapes import Shape

TICK_S = 0.2
MODEL = ModelFingerprint(b"w" * 16, b"a" * 16, "F32")
NO_TRACING = Tracing.from_config(TelemetryConfig(), "simulation")


class Node:
    """`life` counts the incarnations of a name, `exited` names the earlier ones. `wake`: the scheduler has mail.
    `restart`: somebody looks after instances that are broken."""

    def __init__(
        self,
        world: World,
        fabric: Fabric,
        config: TransferConfig,
        name: str,
        life: int,
        exited: tuple[bytes, ...],
        policy: HandoffPolicy,
        where: dict[str, Node],
        shape: Shape,
    ) -> None:
        self.world, self.fabric, self.config, self.name, self.life = world, fabric, config, name, life
        self._where, self.shape = where, shape
        self.incarnation = world.random.randbytes(16)
        self.alive = True
        self.wake: Callable[[], None] = lambda: None
        self.restart: Callable[[], None] = lambda: None
        self.agreeing: Agreeing
        self.pages = Pages(name, world.random)
        self.streams: dict[int, Connection] = {}
        self.links: dict[PeerId, Connection | None] = {}
        # No stream to these can be opened, and nothing passes, before the time.
        self.partitioned: dict[str, float] = {}
        self._down = Pipe(world, self._from_scheduler, IPC_LATENCY_S)
        self._up = Pipe(world, self._to_scheduler, IPC_LATENCY_S)
        self.transceiver = SchedulerTransceiver(self, lambda: world.now, policy)
        self.ranks = [SimRank(self, number, arena) for number, arena in enumerate(arenas(shape, name, life))]
        infos = tuple(rank.role.info for rank in self.ranks)
        local = InstanceInfo(name, self.incarnation, name, self.role, MODEL, infos, exited)
        self.core = HubCore(local, config, self, NO_TRACING)
        where[name] = self
        world.at(TICK_S * world.random.random(), self._tick)

    @property
    def role(self) -> InstanceRole:
        """By its name."""
        return InstanceRole.GENERATION if self.name.startswith("g") else InstanceRole.CONTEXT

    @property
    def exited(self) -> tuple[bytes, ...]:
        """What a successor can prove to have exited."""
        return (*self.core.local.exited_incarnations, self.incarnation)

    def group(self, number: int) -> int:
        """The attention-dp group that a request is computed in."""
        return number % self.shape.groups

    def kill(self) -> None:
        """The hub dies and its ranks with it."""
        for rank in self.ranks:
            rank.die()
        self.alive = False
        for connection in [*self.streams.values(), *filter(None, self.links.values())]:
            connection.end()

    def stop(self) -> None:
        """In order: no rank is left when the hub says goodbye."""
        for rank in self.ranks:
            if rank.alive:
                rank.die()
                self.world.at(self.world.random.random() * 0.1, self._report, rank.number)
        self.world.at(0.1, self._goodbye)
        self.world.at(0.1 + self.world.random.random() * 0.3, self.restart)

    def partition(self, other: Node, seconds: float) -> None:
        """Nothing passes between the two."""
        until = max(self.world.now + seconds, self.partitioned.get(other.name, 0.0))
        self.partitioned[other.name] = other.partitioned[self.name] = until
        for node in (self, other):
            for connection in [*node.streams.values(), *filter(None, node.links.values())]:
                if {connection.generation, connection.context} == {self, other}:
                    connection.there.hold(until)
                    connection.back.hold(until)

    @property
    def idle(self) -> bool:
        """Nothing is held anywhere in this instance."""
        role = self.transceiver
        handed_over = role.held_blocks or not role.check_gen_transfer_complete()
        idle = self.core.is_idle and self.pages.empty and self.agreeing.idle
        return self.alive and idle and not handed_over

    # --- SchedulerPort

    def send(self, message: SchedulerToHub) -> None:
        """From the scheduler role."""
        self._down.put(message)

    # --- hub.core.Effects

    def deliver(self, message: HubToScheduler) -> None:
        """To the scheduler role."""
        self._up.put(message)

    def to_rank(self, rank: int, message: HubToRank) -> None:
        """The pipe of a dead process may take a message or not."""
        if not self.ranks[rank].alive and self.world.random.random() < 0.5:
            raise ConnectionError("the rank is gone")
        self.ranks[rank].commands.put(message)

    def stream_say(self, stream: int, body: PeerBody) -> None:
        """On a stream of a generation instance."""
        if stream in self.streams:
            self.streams[stream].say_back(body)

    def stream_end(self, stream: int, reason: EndReason, text: str) -> None:
        """The context side ends it."""
        self.world.note("context ends stream", self.name, reason.value, text)
        if stream in self.streams:
            self.streams[stream].end()

    def link_say(self, peer: PeerId, body: PeerBody) -> None:
        """On the stream to a context instance."""
        connection = self.links.get(peer)
        if connection is not None:
            connection.say_there(body)

    def link_end(self, peer: PeerId, reason: EndReason, text: str) -> None:
        """The generation side ends it; it is opened again."""
        self.world.note("generation ends stream", self.name, reason.value, text)
        connection = self.links.get(peer)
        if connection is not None:
            connection.end()

    def link_start(self, address: PeerAddress) -> None:
        """Opens streams from now on."""
        peer = (address.instance_id, address.incarnation)
        self.links[peer] = None
        self.world.at(self.world.latency(0.04), self.connect, peer)

    def link_stop(self, peer: PeerId) -> None:
        """No longer."""
        connection = self.links.pop(peer, None)
        if connection is not None:
            connection.end()

    def pair(self, status: PairStatus) -> None:
        """The coordinator would be told."""
        self.world.note("pair", self.name, status.instance_id, status.state.name)

    def fence(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        """A call of its own to whoever answers at the endpoint; without an answer nothing happens."""
        self.world.note("fences", self.name, "->", endpoint)
        self.world.at(self.world.latency(0.04), self._fence_arrives, peer, endpoint, fence)

    def kill_rank(self, rank: int, reason: str) -> None:
        """SIGKILL; the parent reports a little later, and some time after that the instance starts anew."""
        if self.ranks[rank].alive and self.alive:
            self.world.note("kills", self.name, rank, reason)
            self.ranks[rank].die()
            self.world.at(self.world.random.random() * 0.1, self._report, rank)
            self.world.at(0.2 + self.world.random.random() * 2.0, self.restart)

    def stop_instance(self, reason: str) -> None:
        """It ends by itself, and starts anew."""
        self.world.note("stops", self.name, reason)
        self.world.at(0.0, self.restart)

    # --- plumbing

    def _fence_arrives(self, peer: PeerId, endpoint: str, fence: FenceWriter) -> None:
        other = self._where[endpoint]
        if other.alive and self.world.now >= self.partitioned.get(endpoint, 0.0):
            answer = other.core.fence_asked(peer[1], (self.name, self.incarnation), fence)
            self.world.at(self.world.latency(0.04), self._fence_answered, peer, answer)

    def _fence_answered(self, peer: PeerId, answer: FenceAnswer) -> None:
        if self.alive:
            self.core.fence_answered(peer, answer, self.world.now)

    def connect(self, peer: PeerId) -> None:
        """Opens a stream to whoever answers at the endpoint now."""
        if not self.alive or peer not in self.links or self.links[peer] is not None:
            return
        context = self._where[peer[0]]
        if not context.alive or self.world.now < self.partitioned.get(context.name, 0.0):
            self.world.at(0.05 + self.world.random.random() * 0.3, self.connect, peer)
            return
        self.links[peer] = Connection(self, peer, context)
        self.core.generation.opened(peer, self.world.now)

    def _from_scheduler(self, message: SchedulerToHub) -> None:
        if self.alive:
            self.core.from_scheduler(message, self.world.now)

    def _to_scheduler(self, message: HubToScheduler) -> None:
        if self.alive:
            self.transceiver.deliver(message)
            # Applied at a step boundary, which comes when it comes.
            self.world.at(self.world.random.random() * 0.05, self.wake)

    def _tick(self) -> None:
        if self.alive:
            self.core.tick(self.world.now)
            self.world.at(TICK_S, self._tick)

    def _goodbye(self) -> None:
        if self.alive:
            self.world.note("goodbye", self.name)
            self.core.goodbye("told to stop")

    def _report(self, number: int) -> None:
        if self.alive:
            self.world.note("exit report", self.name, number)
            self.core.rank_exited(number, "signal 9", self.world.now)
            self.agreeing.rank_exited(number, "signal 9")
            self.core.settle_lost(self.world.now)
