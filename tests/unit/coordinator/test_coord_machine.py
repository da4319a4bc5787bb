"""Random lives of a cluster against a slow model of it: load never drifts, whoever comes, goes and repeats itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from coord_support import instance
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.load import LegLoad
from isthmus_coordinator.membership import InstanceReplaced, Member, Start
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_coordinator.placement import Question
from isthmus_coordinator.policies import Policy
from isthmus_core.errors import DuplicateRequest, NoCapacity, UnknownModel
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey

NAMES = ["c0", "c1", "g0", "g1", "w0"]
routers = st.integers(1, 3)
keys = st.builds(RequestKey, st.integers(MIN_GLOBAL_ID, MIN_GLOBAL_ID + 5), st.integers(0, 2))
states = st.sampled_from(list(PairState))


class ClusterMachine(RuleBasedStateMachine):
    policy = Policy.ROUND_ROBIN

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(self.policy)
        self.members: dict[str, Member] = {}
        self.gone: list[Member] = []
        self.draining: set[str] = set()
        self.retired: set[Start] = set()
        self.latest: dict[str, Start] = {}
        self.ready: set[tuple[Start, str]] = set()
        self.open: dict[int, tuple[int, RequestKey, tuple[LegLoad, ...]]] = {}

    @rule(name=st.sampled_from(NAMES), start=st.integers(1, 3))
    def join(self, name: str, start: int) -> None:
        one = instance(name, start)
        try:
            member, replaced = self.cluster.join(one)
        except InstanceReplaced:
            assert one.start in self.retired
            return
        assert one.start not in self.retired
        old = self.members.get(name)
        assert (replaced[0] if replaced else None) is old
        if old is not None:
            self._gone(old)
        if name in self.latest and self.latest[name] != one.start:
            self.retired.add(self.latest[name])
        self.latest[name] = one.start
        self.members[name] = member

    @rule(name=st.sampled_from(NAMES))
    def leave(self, name: str) -> None:
        if (member := self.members.pop(name, None)) is not None:
            assert self.cluster.leave(member)
            self._gone(member)

    @rule()
    def leave_again(self) -> None:
        for member in self.gone:
            assert not self.cluster.leave(member)

    def _gone(self, member: Member) -> None:
        name = member.instance.instance_id
        self.gone.append(member)
        self.draining.discard(name)
        self.ready = {pair for pair in self.ready if pair[1] != name}

    @rule(name=st.sampled_from(NAMES))
    def drain(self, name: str) -> None:
        if name in self.members:
            self.cluster.set_draining(self.members[name])
            self.draining.add(name)

    @rule(name=st.sampled_from(["g0", "g1"]))
    def announce(self, name: str) -> None:
        if name in self.members:
            peers = self.cluster.peers(self.members[name])
            self.cluster.announced(self.members[name], peers)
            known = {peer.start for peer in peers}
            self.ready = {pair for pair in self.ready if pair[1] != name or pair[0] in known}

    @rule(name=st.sampled_from(["g0", "g1"]), context=st.sampled_from(["c0", "c1"]), state=states)
    def report(self, name: str, context: str, state: PairState) -> None:
        if name in self.members and context in self.members:
            start = self.members[context].instance.start
            taken = self.cluster.report(self.members[name], start, Pair(state))
            if taken:
                self.ready = {pair for pair in self.ready if (pair[0].instance_id, pair[1]) != (context, name)}
                if state is PairState.READY:
                    self.ready.add((start, name))

    @rule(router=routers, key=keys)
    def select(self, router: int, key: RequestKey) -> None:
        try:
            choice = self.cluster.select(router, Question(key, "m", 1, 1))
        except DuplicateRequest:
            assert key.request_id in self.open
            return
        except (NoCapacity, UnknownModel):
            assert not self._usable()
            return
        assert key.request_id not in self.open
        assert tuple(leg.start for leg in choice.legs) in self._usable()
        assert choice.candidates == len(self._usable())
        self.open[key.request_id] = (router, key, choice.legs)

    def _usable(self) -> set[tuple[Start, ...]]:
        active = {name: member.instance.start for name, member in self.members.items() if name not in self.draining}
        whole = {(start,) for name, start in active.items() if name[0] == "w"}
        return whole | {
            (active[context.instance_id], active[name])
            for context, name in self.ready
            if name in active and active.get(context.instance_id) == context
        }

    @rule(router=routers, key=keys)
    def finish(self, router: int, key: RequestKey) -> None:
        held = self.open.get(key.request_id)
        mine = held is not None and held[:2] == (router, key)
        assert self.cluster.finish(router, key) is mine
        if mine:
            del self.open[key.request_id]

    @rule(router=routers)
    def router_leaves(self, router: int) -> None:
        mine = [number for number, held in self.open.items() if held[0] == router]
        assert self.cluster.drop_router(router) == len(mine)
        for number in mine:
            del self.open[number]

    @rule(old=routers, new=routers)
    def router_reconnects(self, old: int, new: int) -> None:
        named = [(key, legs) for router, key, legs in self.open.values() if router == old]
        self.cluster.adopt(new, named)
        for key, legs in named:
            self.open[key.request_id] = (new, key, legs)

    @invariant()
    def counts_are_true(self) -> None:
        self.cluster.check()
        assert self.cluster.open_requests() == len(self.open)
        on = Counter(leg.start for _, _, legs in self.open.values() for leg in legs)
        for view in self.cluster.members():
            assert view.open_requests == on[view.instance.start]
            assert view.draining == (view.instance.instance_id in self.draining)
        assert [view.instance.instance_id for view in self.cluster.members()] == sorted(self.members)
        assert bool(self.cluster.served()) == bool(self._usable())

    @rule(router=routers, key=keys)
    def prefilled(self, router: int, key: RequestKey) -> None:
        held = self.open.get(key.request_id)
        mine = held is not None and held[:2] == (router, key)
        assert self.cluster.prefilled(router, key) is mine
        if held is not None and mine:
            self.open[key.request_id] = (*held[:2], tuple(replace(leg, prefill=0) for leg in held[2]))


class LeastLoadMachine(ClusterMachine):
    policy = Policy.LEAST_LOAD


class AffinityMachine(ClusterMachine):
    policy = Policy.AFFINITY


TestCluster = ClusterMachine.TestCase
TestLeastLoad = LeastLoadMachine.TestCase
TestAffinity = AffinityMachine.TestCase
for _case, _examples in ((TestCluster, 40), (TestLeastLoad, 20), (TestAffinity, 20)):
    _case.settings = settings(max_examples=_examples, stateful_step_count=40, deadline=None)
