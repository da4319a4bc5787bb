"""A cluster with instances, pairs and routers that a test moves by hand."""

from __future__ import annotations

from coord_support import instance
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.membership import Instance, Member
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_coordinator.placement import Question
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey

READY = Pair(PairState.READY)


def key(number: int, attempt: int = 0) -> RequestKey:
    return RequestKey(MIN_GLOBAL_ID + number, attempt)


class World:
    """A cluster whose generation instances hear of their peers and report them ready at once."""

    def __init__(self, *names: str, ready: bool = True) -> None:
        self.cluster = Cluster()
        self.members: dict[str, Member] = {}
        for name in names:
            self.join(instance(name))
        if ready:
            self.connect()

    def join(self, one: Instance) -> Member:
        self.members[one.instance_id], _ = self.cluster.join(one)
        return self.members[one.instance_id]

    def connect(self) -> None:
        for member in self.members.values():
            peers = self.cluster.peers(member)
            if member.instance.role.name == "GENERATION":
                self.cluster.announced(member, peers)
            for peer in peers:
                assert self.cluster.report(member, peer.start, READY)

    def place(self, number: int, router: int = 1, model: str = "m") -> tuple[str | None, str]:
        placement = self.cluster.select(router, Question(key(number), model, 3, 3)).placement
        return placement.context and placement.context.instance_id, placement.generation.instance_id

    def select(self, number: int, prompt: int, output: int) -> str:
        question = Question(key(number), "m", prompt, output)
        return self.cluster.select(1, question).placement.generation.instance_id

    def open(self) -> dict[str, int]:
        return {view.instance.instance_id: view.open_requests for view in self.cluster.members() if view.open_requests}
