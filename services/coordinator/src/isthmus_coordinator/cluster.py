"""The cluster as values: members, pairs, open placements, and the decisions made from them. No I/O, no clock.

The servicer feeds it what streams say and asks it what to tell them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from isthmus_coordinator.costs import Weights
from isthmus_coordinator.fleet import Fleet
from isthmus_coordinator.load import LegLoad, OpenPlacements
from isthmus_coordinator.membership import Instance, Load, Member, Membership, Peers, Role, Start
from isthmus_coordinator.pairs import CONNECTING, Estimate, Pair, Pairs
from isthmus_coordinator.placement import Choice, Question, Served, no_capacity, place
from isthmus_coordinator.policies import Policy
from isthmus_coordinator.prefix import PrefixIndex
from isthmus_core.errors import InternalError, InvalidRequest, IsthmusError, NoCapacity, UnknownModel
from isthmus_core.keys import RequestKey

_INDEX_BLOCKS = 1 << 24


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member, the open placements on it and their tokens, its blocks in the prefix index, what it has finished."""

    member: Member
    open_requests: int
    open_tokens: int
    indexed_blocks: int
    finished_requests: int

    @property
    def instance(self) -> Instance:
        """Who and where."""
        return self.member.instance

    @property
    def draining(self) -> bool:
        """Whether it takes no new requests."""
        return self.member.draining

    @property
    def load(self) -> Load:
        """Last reported load."""
        return self.member.load


@dataclass(frozen=True, slots=True)
class PairView:
    """A context and a generation instance of one model."""

    context_id: str
    generation_id: str
    pair: Pair


class Cluster:
    """Everything the coordinator knows except leases. `router` is the token of a router's stream. `index_blocks`: most
    different blocks in the prefix index."""

    def __init__(
        self,
        policy: Policy = Policy.ROUND_ROBIN,
        weights: Weights | None = None,
        index_blocks: int = _INDEX_BLOCKS,
    ) -> None:
        self.policy = policy
        self._weights = weights or Weights()
        self.index = PrefixIndex(index_blocks)
        self._members = Membership()
        self._pairs = Pairs()
        self._open = OpenPlacements()
        self._turns: Counter[str] = Counter()
        # By model, as long as it has members.
        self._fleets: dict[str, Fleet] = {}
        self._contexts: dict[str, Peers] = {}
        # Grows with every change that a watcher hears of.
        self.version = 0

    # Members

    def join(self, instance: Instance) -> tuple[Member, tuple[Member, IsthmusError] | None]:
        """As `Membership.join`."""
        member, replaced = self._members.join(instance)
        if replaced is not None:
            self._forget(replaced[0])
        self._open.joined(member)
        self._enter(member)
        return member, replaced

    def leave(self, member: Member) -> bool:
        """The member's stream is over. False when it has been replaced before."""
        if not self._members.leave(member):
            return False
        self._forget(member)
        return True

    def set_load(self, member: Member, load: Load) -> None:
        """Last reported load."""
        if load != member.load:
            self._mark(member)
        member.load = load
        if self._members.has(member):
            self._open.reported(member)

    def set_draining(self, member: Member) -> None:
        """No new work for it."""
        member.draining = True
        self._changed(member)

    def set_role(self, member: Member, role: Role, changing_to: Role | None, refused: str) -> None:
        """The role a member has now, and the one that it is changing to. Raises InvalidRequest for a role that it has
        not said to be possible."""
        if role is not member.role and role not in member.instance.possible_roles:
            raise InvalidRequest("role.role", role.name, "take a role that instance.possible_roles names")
        if not self._members.has(member):
            return
        member.refused = refused
        if role is not member.role:
            self._withdraw(member)
            member.instance = replace(member.instance, role=role)
            member.changing_to = changing_to
            self._enter(member)
        else:
            member.changing_to = changing_to
            self._changed(member)

    def has(self, member: Member) -> bool:
        """True until the member leaves or is replaced."""
        return self._members.has(member)

    def get(self, instance_id: str) -> Member | None:
        """The member of that name."""
        return self._members.get(instance_id)

    def report(self, member: Member, context: Start, pair: Pair) -> bool:
        """What a generation instance says about a pair. False when that is stale.

        Raises InvalidRequest when the member is no generation instance."""
        if member.role is not Role.GENERATION:
            raise InvalidRequest("pair", member.role.name, "only generation instances report pairs")
        if not (self._members.has(member) and self._pairs.report(member.token, context, pair)):
            return False
        self._show_pair(context, member)
        return True

    def estimate(self, member: Member, generation: Start, estimate: Estimate) -> None:
        """What a context instance has measured. Raises InvalidRequest when the member is none."""
        if member.role is not Role.CONTEXT:
            raise InvalidRequest("estimate", member.role.name, "only context instances send estimates")
        if not self._members.has(member):
            return
        self._pairs.estimate(member.token, generation, estimate)
        other = self._members.get(generation.instance_id)
        if other is not None and other.instance.start == generation and other.role is Role.GENERATION:
            self._show_pair(member.instance.start, other)

    def peers(self, member: Member) -> Peers:
        """Context instances that a member keeps streams to: none unless it is a generation instance, then all of its
        model. Draining ones too: what they hold must still be handed off."""
        if member.role is not Role.GENERATION:
            return Peers()
        model = member.instance.model
        contexts = self._contexts.get(model)
        if contexts is None:
            of_model = self._fleets[model].members(Role.CONTEXT) if model in self._fleets else []
            contexts = self._contexts[model] = Peers(other.instance for other in of_model)
        return contexts

    def announced(self, member: Member, peers: Peers) -> None:
        """A generation instance is being told this list of peers now."""
        if self._members.has(member) and member.role is Role.GENERATION:
            for start in self._pairs.announced(member.token, peers):
                self._show_pair(start, member)

    # Requests

    def select(self, router: int, question: Question) -> Choice:
        """Choose and count a placement. Raises DuplicateRequest, UnknownModel, NoCapacity with the reason, or
        InvalidRequest when the request is longer than every placement."""
        self._open.refuse_live(question.key.request_id)
        fleet = self._fleets.get(question.model)
        if fleet is None:
            raise self._unknown(question.model)
        turn = self._turns[question.model]
        choice = place(self.policy, self._weights, fleet.view(), self._open.loads, self.index, question, turn)
        if choice is None:
            raise no_capacity(question.model, [one for role in Role for one in fleet.members(role)], self._pairs)
        self._turns[question.model] += 1
        self._open.reserve(router, question.key, choice.legs)
        return choice

    def prefilled(self, router: int, key: RequestKey) -> bool:
        """The prompt of a placement has been computed. False when the router holds no such one."""
        return self._open.prefilled(router, key)

    def finish(self, router: int, key: RequestKey) -> bool:
        """Release a placement. False when the router holds no such one."""
        return self._open.finish(router, key)

    def adopt(self, router: int, placements: Iterable[tuple[RequestKey, tuple[LegLoad, ...]]]) -> None:
        """Count the placements that a router names after a reconnect."""
        self._open.adopt(router, placements)

    def drop_router(self, router: int) -> int:
        """The router's stream is over: release everything it holds. Returns how many placements that were."""
        return self._open.drop_router(router)

    # Views

    def served(self) -> tuple[Served, ...]:
        """Models with a usable placement, by name."""
        found: list[Served] = []
        for model in sorted(self._fleets):
            view = self._fleets[model].view()
            if view.placements:
                keyings = sorted(view.keyings.items())
                found.append(Served(model, view.shortest, tuple(keying for _, keying in keyings)))
        return tuple(found)

    def all_members(self) -> Iterator[Member]:
        """Every member, by instance id."""
        return iter(self._members)

    def members(self) -> tuple[MemberView, ...]:
        """Every member, by instance id."""
        return tuple(self.member_view(member) for member in self._members)

    def member_view(self, member: Member) -> MemberView:
        """A member as others see it."""
        requests, tokens = self._open.on(member.instance.start)
        finished = self._open.finished(member.instance.start)
        return MemberView(member, requests, tokens, self.index.blocks(member.number), finished)

    def ready_contexts(self, member: Member) -> list[Member]:
        """Context instances that a generation instance has a ready stream to."""
        return self._fleets[member.instance.model].ready_contexts(member)

    def pairs(self) -> tuple[PairView, ...]:
        """Every context and generation instance of the same model."""
        return tuple(
            PairView(one.instance.instance_id, other.instance.instance_id, self._pairs.state(one, other))
            for _, fleet in sorted(self._fleets.items())
            for one in fleet.members(Role.CONTEXT)
            for other in fleet.members(Role.GENERATION)
        )

    def open_requests(self) -> int:
        """Placements that have not been finished."""
        return len(self._open)

    def check(self) -> None:
        """Compare all counts with what they count. Raises InternalError."""
        self._open.check()
        self.index.check()
        generations = sum(member.role is Role.GENERATION for member in self._members)
        if len(self._pairs) != generations:
            raise InternalError(f"pair reports of {len(self._pairs)} streams for {generations} generation instances")
        if sum(len(fleet) for fleet in self._fleets.values()) != len(self._members):
            raise InternalError("fleets and members differ")

    def _unknown(self, model: str) -> IsthmusError:
        if not len(self._members):
            return NoCapacity("no instance has registered yet")
        return UnknownModel(model, self._members.models())

    def _enter(self, member: Member) -> None:
        """A member begins to be used in its role."""
        fleet = self._fleets.setdefault(member.instance.model, Fleet())
        fleet.add(member)
        self._mark(member)
        if member.role is Role.GENERATION:
            self._pairs.open(member.token)
        elif member.role is Role.CONTEXT:
            self._contexts.pop(member.instance.model, None)
            for other in fleet.members(Role.GENERATION):
                pair = self._pairs.state(member, other)
                if pair is not CONNECTING:
                    fleet.set_pair(member, other, pair)
                    self._mark_pairs(other)

    def _withdraw(self, member: Member) -> None:
        """A member is no longer used in its role."""
        model = member.instance.model
        self._pairs.forget(member.token)
        fleet = self._fleets[model]
        if member.role is Role.CONTEXT:
            self._contexts.pop(model, None)
            for other in fleet.members(Role.GENERATION):
                self._mark_pairs(other)
        elif member.role is Role.GENERATION:
            self._mark_pairs(member)
        fleet.remove(member)
        if not len(fleet):
            self._contexts.pop(model, None)
            del self._fleets[model]
            self._turns.pop(model, None)

    def _forget(self, member: Member) -> None:
        self.version += 1
        self._withdraw(member)
        self._open.left(member)
        self.index.drop(member.number)

    def _show_pair(self, context: Start, generation: Member) -> None:
        """In the fleet, when the context instance is there."""
        other = self._members.get(context.instance_id)
        same_model = other is not None and other.instance.model == generation.instance.model
        if other is not None and same_model and other.role is Role.CONTEXT and other.instance.start == context:
            pair = self._pairs.state(other, generation)
            self._fleets[generation.instance.model].set_pair(other, generation, pair)
            self._mark_pairs(generation)

    def _changed(self, member: Member) -> None:
        if self._members.has(member):
            self._mark(member)
            self._fleets[member.instance.model].changed()

    def _mark(self, member: Member) -> None:
        self.version += 1
        member.changed_at = self.version

    def _mark_pairs(self, member: Member) -> None:
        self.version += 1
        member.pairs_changed_at = self.version
