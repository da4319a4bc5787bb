"""One seeded schedule: a router's requests over a few instances, and what happens to them on the way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from handoff_sim import CONFIG, RANKS, Node, Violation, World, code_of
from hub_world import blocks, key
from kvtransfer.control.generation import PeerAddress
from kvtransfer.ports import Holder, ReceiveRequest, TokenRange, TransferFailure
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.receive import CONNECT_PATIENCE_S

if TYPE_CHECKING:
    from kvtransfer.ports import RankBlocks, ReceiveOutcome, RequestKey, SendOutcome

PAGES, PROMPT = 6, 2
HORIZON_S = 60.0
# A client hears within this time after its generation leg has asked.
BOUND_S = CONFIG.timeout_s + min(CONNECT_PATIENCE_S, CONFIG.timeout_s) + 1.0


@dataclass
class Ask:
    """One attempt at one request."""

    key: RequestKey
    context: Node
    generation: Node | None = None
    pages: list[int] = field(default_factory=list[int])
    asked: float = 0.0
    told: bool = False
    sent: TransferFailure | None = None
    received: TransferFailure | None = None
    settled: bool = False


class Schedule:
    """Run with `run`; raises Violation."""

    def __init__(self, seed: int, requests: int = 5) -> None:
        self.world = World(seed)
        self.random = self.world.random
        self.where: dict[str, Node] = {}
        for name in ("c0", "c1"):
            self._node(name, ())
        self._node("g0", ())
        self._announce()
        self.asks: dict[RequestKey, Ask] = {}
        self.waiting = requests
        for number in range(requests):
            self.world.at(self.random.random() * 2, lambda number=number: self._prefill(key(number)))
        for _ in range(self.random.choice((0, 1, 1, 2, 3, 4))):
            self.world.at(self.random.random() * 3, self._fault)
        self.outcomes: list[TransferFailure] = []

    def run(self) -> None:
        """To the end; then nothing may be left anywhere."""
        self.world.run(self._over, HORIZON_S)
        if not self._over():
            raise Violation("the world stands still and is not over")
        for node in self.where.values():
            node.core.ledger.check_integrity()

    def _over(self) -> bool:
        return self.waiting == 0 and all(
            node.alive and node.core.is_idle and not any(node.owner) and node.transceiver.check_gen_transfer_complete()
            for node in self.where.values()
        )

    def _node(self, name: str, exited: tuple[bytes, ...]) -> None:
        role = InstanceRole.GENERATION if name.startswith("g") else InstanceRole.CONTEXT
        node = Node(self.world, name, role, PAGES, self.where, exited)
        node.wake = lambda: self._step(node)

    def _announce(self) -> None:
        peers = [
            PeerAddress(name, node.incarnation, name)
            for name, node in self.where.items()
            if name.startswith("c") and node.alive
        ]
        if self.where["g0"].alive:
            self.where["g0"].core.set_peers(peers, self.world.now)

    # --- requests

    def _prefill(self, key: RequestKey) -> None:
        context = self.where[self.random.choice(("c0", "c1"))]
        pages = context.take(key, PROMPT) if context.alive else None
        if pages is None:
            self.world.at(0.1, lambda: self._prefill(key))
            return
        context.fill(key, pages)
        ask = self.asks[key] = Ask(key, context)
        context.transceiver.respond_and_send_async(key, TokenRange(0, PROMPT), _lists(pages))
        late = self.random.random() < 0.05
        self.world.at(5.0 if late else 0.02 + self.world.latency(), lambda: self._ask(ask))

    def _ask(self, ask: Ask) -> None:
        generation = self.where["g0"]
        pages = generation.take(ask.key, PROMPT) if generation.alive else None
        if pages is None:
            self.world.at(0.1, lambda: self._ask(ask))
            return
        ask.generation, ask.pages, ask.asked = generation, pages, self.world.now
        holder = Holder(ask.context.name, ask.context.name, ask.context.incarnation)
        request = ReceiveRequest(ask.key, TokenRange(0, PROMPT), _lists(pages), holder)
        generation.transceiver.request_and_receive_async(request)
        self.world.at(BOUND_S, lambda: self._bound(ask))

    def _bound(self, ask: Ask) -> None:
        if not ask.told and ask.generation is not None and ask.generation.alive:
            raise Violation(f"request {ask.key} has heard nothing within its deadline")

    def _step(self, node: Node) -> None:
        """The scheduler's loop."""
        if not node.alive:
            return
        for sent in node.transceiver.check_context_transfer_status():
            self._sent(node, sent)
        for outcome in node.transceiver.check_gen_transfer_status():
            self._received(node, outcome)

    def _sent(self, node: Node, outcome: SendOutcome) -> None:
        ask = self.asks[outcome.key]
        self.world.note(f"sent {outcome.failure.name}", str(outcome.key))
        if ask.sent is not None:
            raise Violation(f"the offer {outcome.key} has ended twice")
        ask.sent = outcome.failure
        self._agree(ask)
        node.give_back(outcome.key)

    def _agree(self, ask: Ask) -> None:
        if ask.sent is TransferFailure.NONE and ask.received is TransferFailure.NOT_HELD:
            raise Violation(f"{ask.key} was delivered whole, and then its pages were never held")

    def _received(self, node: Node, outcome: ReceiveOutcome) -> None:
        ask = self.asks[outcome.key]
        kind = outcome.failure.name if outcome.settled else f"{outcome.failure.name} unsettled"
        self.world.note(f"received {kind}", str(outcome.key))
        if ask.settled or (ask.told and not outcome.settled):
            raise Violation(f"attempt {outcome.key} has two outcomes of one kind")
        ask.told, ask.settled = True, outcome.settled
        if not outcome.settled:
            return
        self.outcomes.append(outcome.failure)
        ask.received = outcome.failure
        self._agree(ask)
        if outcome.failure is TransferFailure.NONE:
            for rank in range(RANKS):
                for page in ask.pages:
                    if node.words(rank, page) != [code_of(ask.key, rank)] * 2:
                        raise Violation(f"{ask.key} decodes from a page that holds {node.words(rank, page)}")
        node.give_back(outcome.key)
        self._finished(ask, failed=outcome.failure is not TransferFailure.NONE)

    def _finished(self, ask: Ask, *, failed: bool) -> None:
        if failed and ask.key.attempt < 2 and self.random.random() < 0.6:
            again = type(ask.key)(ask.key.request_id, ask.key.attempt + 1)
            self.world.at(self.world.latency(), lambda: self._prefill(again))
        else:
            self.waiting -= 1

    # --- faults

    def _fault(self) -> None:
        open_asks = [ask for ask in self.asks.values() if not ask.settled]
        contexts = [self.where["c0"], self.where["c1"]]
        generation = self.where["g0"]
        fault = self.random.choice(
            ("break", "break", "break", "cancel", "cancel", "withdraw", "rank", "context", "generation", "leave")
        )
        self.world.note(f"fault {fault}")
        match fault:
            case "break":
                links = [link for link in generation.links.values() if link is not None]
                if links:
                    self.random.choice(links).end()
            case "cancel":
                asked = [ask for ask in open_asks if ask.generation is generation]
                if asked and generation.alive:
                    generation.transceiver.cancel_request(self.random.choice(asked).key)
            case "withdraw":
                if open_asks:
                    ask = self.random.choice(open_asks)
                    if ask.context.alive:
                        ask.context.transceiver.cancel_request(ask.key)
            case "rank":
                context = self.random.choice(contexts)
                context.kill_rank(self.random.randrange(RANKS))
                self.world.at(0.6, lambda: self._restart(context))
            case "context":
                self._restart(self.random.choice(contexts))
            case "generation":
                self._restart(generation)
            case _:
                generation.core.set_peers([], self.world.now)
                self.world.at(self.random.random(), self._announce)

    def _restart(self, node: Node) -> None:
        """The hub dies, its ranks with it; the successor on this host takes the lock that all of them held."""
        if not node.alive:
            return
        node.kill()
        self.world.at(0.05 + self.random.random() * 0.5, lambda: self._succeed(node))
        if node.name != "g0":
            return
        for ask in self.asks.values():
            if ask.generation is node and not ask.settled:
                ask.settled = ask.told = True
                self._finished(ask, failed=True)

    def _succeed(self, node: Node) -> None:
        self._node(node.name, (*node.core.local.exited_incarnations, node.incarnation))
        self.world.at(self.world.latency(0.3), self._announce)


def _lists(pages: list[int]) -> tuple[RankBlocks, ...]:
    return tuple(one for rank in range(RANKS) for one in blocks(*pages, rank=rank))
