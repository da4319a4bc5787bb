"""The cluster as values: members, pairs, open placements, and the decisions made from them. No I/O, no clock.

The servicer feeds it what streams say and asks it what to tell them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus_coordinator.load import OpenPlacements
from isthmus_coordinator.membership import Instance, Load, Member, Membership, Role, Start
from isthmus_coordinator.pairs import Pair, Pairs
from isthmus_coordinator.placement import Placement, Served, choose, no_capacity, usable
from isthmus_core.errors import InternalError, InvalidRequest, IsthmusError, NoCapacity, UnknownModel
from isthmus_core.keys import RequestKey


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement and among how many it was chosen."""

    placement: Placement
    candidates: int


@dataclass(frozen=True, slots=True)
class MemberView:
    """A member and the open placements on it."""

    instance: Instance
    load: Load
    draining: bool
    open_requests: int


@dataclass(frozen=True, slots=True)
class PairView:
    """A context and a generation instance of one model."""

    context_id: str
    generation_id: str
    pair: Pair


class Cluster:
    """Everything the coordinator knows except leases. `router` is the token of a router's stream."""

    def __init__(self) -> None:
        self._members = Membership()
        self._pairs = Pairs()
        self._open = OpenPlacements()
        self._turns: Counter[str] = Counter()
        # By model; dropped when something about the model's members or pairs changes.
        self._usable: dict[str, tuple[Placement, ...]] = {}
        self._contexts: dict[str, tuple[Instance, ...]] = {}

    # Members

    def join(self, instance: Instance) -> tuple[Member, tuple[Member, IsthmusError] | None]:
        """As `Membership.join`."""
        member, replaced = self._members.join(instance)
        if replaced is not None:
            self._forget(replaced[0])
        if instance.role is Role.GENERATION:
            self._pairs.open(member.token)
        self._contexts.pop(instance.model, None)
        self._changed(member)
        return member, replaced

    def leave(self, member: Member) -> bool:
        """The member's stream is over. False when it has been replaced before."""
        if not self._members.leave(member):
            return False
        self._forget(member)
        return True

    def set_load(self, member: Member, load: Load) -> None:
        """Last reported load."""
        member.load = load

    def set_draining(self, member: Member) -> None:
        """No new work for it."""
        member.draining = True
        self._changed(member)

    def report(self, member: Member, context: Start, pair: Pair) -> bool:
        """What a generation instance says about a pair. False when that is stale.

        Raises InvalidRequest when the member is no generation instance."""
        if member.instance.role is not Role.GENERATION:
            raise InvalidRequest("pair", member.instance.role.name, "only generation instances report pairs")
        taken = self._members.has(member) and self._pairs.report(member.token, context, pair)
        if taken:
            self._changed(member)
        return taken

    def peers(self, member: Member) -> tuple[Instance, ...]:
        """Context instances that a member keeps streams to: none unless it is a generation instance, then all of its
        model. Draining ones too: what they hold must still be handed off."""
        if member.instance.role is not Role.GENERATION:
            return ()
        model = member.instance.model
        contexts = self._contexts.get(model)
        if contexts is None:
            of_model = self._members.of_model(model)
            contexts = tuple(other.instance for other in of_model if other.instance.role is Role.CONTEXT)
            self._contexts[model] = contexts
        return contexts

    def announced(self, member: Member, peers: Iterable[Instance]) -> None:
        """A generation instance is being told this list of peers now."""
        if self._members.has(member):
            self._pairs.announced(member.token, peers)
            self._changed(member)

    # Requests

    def select(self, router: int, key: RequestKey, model: str, prompt_tokens: int, max_tokens: int) -> Choice:
        """Choose and count a placement. Raises DuplicateRequest, UnknownModel, NoCapacity with the reason, or
        InvalidRequest when the request is longer than every placement."""
        self._open.refuse_live(key.request_id)
        placements = self._placements(model)
        if not placements:
            self._refuse(model)
        placement = choose(placements, self._turns[model], prompt_tokens + max_tokens, model)
        self._turns[model] += 1
        self._open.reserve(router, key, placement.starts)
        return Choice(placement, len(placements))

    def finish(self, router: int, key: RequestKey) -> bool:
        """Release a placement. False when the router holds no such one."""
        return self._open.finish(router, key)

    def adopt(self, router: int, placements: Iterable[tuple[RequestKey, tuple[Start, ...]]]) -> None:
        """Count the placements that a router names after a reconnect."""
        self._open.adopt(router, placements)

    def drop_router(self, router: int) -> int:
        """The router's stream is over: release everything it holds. Returns how many placements that were."""
        return self._open.drop_router(router)

    # Views

    def served(self) -> tuple[Served, ...]:
        """Models with a usable placement, by name."""
        return tuple(
            Served(model, min(placement.max_model_len for placement in placements))
            for model in self._members.models()
            if (placements := self._placements(model))
        )

    def members(self) -> tuple[MemberView, ...]:
        """Every member, by instance id."""
        return tuple(
            MemberView(member.instance, member.load, member.draining, self._open.on(member.instance.start))
            for member in self._members
        )

    def pairs(self) -> tuple[PairView, ...]:
        """Every context and generation instance of the same model."""
        contexts = [member for member in self._members if member.instance.role is Role.CONTEXT]
        generations = [member for member in self._members if member.instance.role is Role.GENERATION]
        return tuple(
            PairView(one.instance.instance_id, other.instance.instance_id, self._pairs.state(one, other))
            for one in contexts
            for other in generations
            if one.instance.model == other.instance.model
        )

    def open_requests(self) -> int:
        """Placements that have not been finished."""
        return len(self._open)

    def check(self) -> None:
        """Compare all counts with what they count. Raises InternalError."""
        self._open.check()
        generations = sum(member.instance.role is Role.GENERATION for member in self._members)
        if len(self._pairs) != generations:
            raise InternalError(f"pair reports of {len(self._pairs)} streams for {generations} generation instances")

    def _placements(self, model: str) -> tuple[Placement, ...]:
        placements = self._usable.get(model)
        if placements is None:
            members = self._members.of_model(model)
            placements = usable(members, self._pairs)
            if members:  # names that only requests know are not kept
                self._usable[model] = placements
        return placements

    def _refuse(self, model: str) -> None:
        if not len(self._members):
            raise NoCapacity("no instance has registered yet")
        members = self._members.of_model(model)
        if not members:
            raise UnknownModel(model, self._members.models())
        raise no_capacity(model, members, self._pairs)

    def _forget(self, member: Member) -> None:
        self._pairs.forget(member.token)
        model = member.instance.model
        self._contexts.pop(model, None)
        self._changed(member)
        if model in self._turns and not self._members.of_model(model):
            del self._turns[model]

    def _changed(self, member: Member) -> None:
        self._usable.pop(member.instance.model, None)
