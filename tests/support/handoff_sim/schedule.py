"""One schedule: a router's requests over a few instances, what happens to them on the way, and what must hold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvtransfer.config import TransferConfig
from kvtransfer.control.generation import PeerAddress
from kvtransfer.ports import TransferFailure
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.policy import HandoffPolicy

from .agreeing import Agreeing
from .bounced import MAX_PEERS, UNIT_BYTES
from .clock import World
from .context_leg import ContextLegs
from .coverage import Coverage
from .fabric import Fabric
from .faults import Faults
from .generation_leg import GenerationLegs
from .node import Node
from .script import PAGES_PER_NODE
from .violation import Violation

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey

    from .attempt import Attempt
    from .script import RequestPlan, Script

CONFIG = TransferConfig(
    "sim",
    timeout_s=3,
    handoff_hold_s=4,
    drain_s=0.3,
    ping_s=1,
    in_doubt_s=2,
    leak_budget_bytes=4 * 32,
    max_peers=MAX_PEERS,
    bounce_unit_bytes=UNIT_BYTES,
)
HORIZON_S = 60.0


class Schedule:
    """Run with `run`; raises Violation."""

    def __init__(self, script: Script, coverage: Coverage | None = None) -> None:
        self.script = script
        self.world = World(script.seed, wire=script.wire)
        self.fabric = Fabric(self.world, script.flaky)
        self.attempts: dict[RequestKey, Attempt] = {}
        self.context_legs = ContextLegs(self)
        self.generation_legs = GenerationLegs(self, CONFIG.timeout_s)
        self.where: dict[str, Node] = {}
        self._policy = HandoffPolicy(script.retries, max_held_blocks=PAGES_PER_NODE - 2)
        for number in range(script.contexts):
            self.node(f"c{number}")
        for number in range(script.generations):
            self.node(f"g{number}")
        self.announce()
        self.waiting = len(script.requests)
        for plan in script.requests:
            self.world.at(plan.at, self.start, plan, 0)
        self.faults = Faults(self, coverage or Coverage())
        for fault in script.faults:
            self.world.at(fault.at, self.faults.happen, fault)

    def run(self) -> None:
        """To the end; then nothing may be left anywhere."""
        self.world.run(self._over, HORIZON_S)
        if not self._over():
            raise Violation("the world stands still and is not over")
        for node in self.where.values():
            node.core.ledger.check_integrity()
            for rank in node.ranks:
                if rank.alive and rank.keeps_room:
                    raise Violation(f"{rank.port.name} keeps room for chunks of nobody")

    def open_attempts(self) -> list[Attempt]:
        """Attempts of which a leg is not over."""
        return [attempt for attempt in self.attempts.values() if attempt.phase is not None]

    # --- instances

    def node(self, name: str) -> None:
        """The first or next incarnation of an instance."""
        before = self.where.get(name)
        life, exited = (0, ()) if before is None else (before.life + 1, before.exited)
        shape = self.script.shapes[name.startswith("g")]
        node = Node(self.world, self.fabric, CONFIG, name, life, exited, self._policy, self.where, shape)
        node.wake = partial(self._step, node)
        node.restart = partial(self.restart, node)
        node.agreeing = Agreeing(node, partial(self.generation_legs.applied, node))

    def contexts(self) -> list[Node]:
        """Living or not."""
        return [node for node in self.where.values() if node.role is InstanceRole.CONTEXT]

    def generations(self) -> list[Node]:
        """Living or not."""
        return [node for node in self.where.values() if node.role is InstanceRole.GENERATION]

    def announce(self) -> None:
        """The coordinator's list of living context instances."""
        peers = [PeerAddress(node.name, node.incarnation, node.name) for node in self.contexts() if node.alive]
        for node in self.generations():
            if node.alive:
                node.core.set_peers(peers, self.world.now)

    def restart(self, node: Node) -> None:
        """The hub dies, its ranks with it; the successor on this host takes the lock that all of them held."""
        if not node.alive:
            return
        node.kill()
        self.world.note("dies", node.name)
        self.world.at(0.05 + self.world.random.random() * 0.5, self._succeed, node.name)
        for attempt in list(self.attempts.values()):
            if attempt.generation is node and not attempt.finished:
                attempt.told, attempt.agreeing, attempt.received = True, False, TransferFailure.PEER_LOST
                self.finished(attempt, failed=True)

    def _succeed(self, name: str) -> None:
        self.node(name)
        self.world.note("starts", name)
        self.world.at(self.world.latency(0.3), self.announce)

    def _step(self, node: Node) -> None:
        """One turn of an instance's scheduler."""
        if node.alive:
            self.context_legs.step(node)
            self.generation_legs.step(node)

    # --- requests

    def start(self, plan: RequestPlan, number: int) -> None:
        """The router starts an attempt."""
        (self.context_legs.both if plan.generation_first else self.context_legs.prefill)(plan, number)

    def finished(self, attempt: Attempt, *, failed: bool) -> None:
        """The router is told, once per attempt. It cancels a context leg that nobody waits for, and tries again."""
        attempt.finished, plan, again = True, attempt.plan, attempt.key.attempt + 1
        if plan.generation_first and failed and attempt.context.alive:
            attempt.context.transceiver.cancel_request(attempt.key)
        if failed and again < plan.attempts:
            self.world.at(self.world.latency(0.04), self.start, plan, again)
        else:
            self.waiting -= 1

    def agree(self, attempt: Attempt) -> None:
        """Both legs must tell the same story."""
        if attempt.sent is TransferFailure.NONE and attempt.received is TransferFailure.NOT_HELD:
            raise Violation(f"{attempt.key} was delivered whole, and then its pages were never held")

    def _over(self) -> bool:
        return self.waiting == 0 and all(node.idle for node in self.where.values())
