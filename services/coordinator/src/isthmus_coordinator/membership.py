"""Who is there. A member lives exactly as long as its Register stream; the newest start of an instance wins."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TypeVar

import grpc

from isthmus_core.block_keys import Keying
from isthmus_core.errors import IsthmusError

K = TypeVar("K")
V = TypeVar("V")

# Replaced starts that are remembered, so that none of them comes back and pushes its successor out.
_MAX_REPLACED = 4096


class Role(Enum):
    """What an instance does with a request. Values are those of `isthmus.v1.InstanceRole`."""

    CONTEXT = 1
    GENERATION = 2
    CONTEXT_AND_GENERATION = 3


@dataclass(frozen=True, slots=True)
class Start:
    """One start of one instance: stable name and 16 random bytes."""

    instance_id: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as it presents itself. `max_model_len`: prompt plus output in tokens. `keying`: how its blocks are
    named, None when it reuses none. `possible_roles`: those that an operator may give it."""

    instance_id: str
    incarnation: bytes
    endpoint: str
    role: Role
    model: str
    max_model_len: int
    tokens_per_block: int
    engine: str
    schema_version: int
    total_blocks: int
    keying: Keying | None = None
    possible_roles: frozenset[Role] = frozenset()
    # Its name and this start of it: asked for far more often than made.
    start: Start = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", Start(self.instance_id, self.incarnation))


class Peers(tuple[Instance, ...]):
    """Context instances that generation instances of a model keep streams to: one list for all of them."""

    @cached_property
    def starts(self) -> frozenset[Start]:
        """Those that reports may be about."""
        return frozenset(peer.start for peer in self)


@dataclass(frozen=True, slots=True)
class Load:
    """Last reported load: requests and KV blocks. `receive_credits`: blocks that caches from context instances may take
    now; 0 for none, and from engines that do not tell."""

    running_requests: int = 0
    waiting_requests: int = 0
    held_handoffs: int = 0
    used_blocks: int = 0
    total_blocks: int = 0
    in_doubt_blocks: int = 0
    receive_credits: int = 0


class InstanceReplaced(IsthmusError):
    """Another start of the instance has its name now: this one is not to try again."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, instance_id: str) -> None:
        super().__init__(
            f"another process has registered as instance {instance_id}: stop one of the two, or give it another "
            "worker.instance_id"
        )


class StreamReplaced(IsthmusError):
    """The same process has opened another stream; this one is what is left of a broken connection."""

    code = grpc.StatusCode.ABORTED

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} has opened another stream")


@dataclass(slots=True)
class Member:
    """A registered instance. `token` names its stream, `number` its place in arrays, used again once it is gone.
    `changing_to`: the role that it is about to take. `refused`: why it did not follow its last order. `changed_at`,
    `pairs_changed_at`: versions of the cluster when it, or its ready pairs, changed last."""

    token: int
    number: int
    instance: Instance
    load: Load = field(default_factory=Load)
    draining: bool = False
    changing_to: Role | None = None
    refused: str = ""
    changed_at: int = 0
    pairs_changed_at: int = 0

    @property
    def role(self) -> Role:
        """The role it has now."""
        return self.instance.role

    @property
    def usable(self) -> bool:
        """Whether it takes new work."""
        return not self.draining and self.changing_to is None


class Membership:
    """Members by instance id, each with the token of the stream that keeps it."""

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._tokens = itertools.count(1)
        self._free: list[int] = []
        # Insertion-ordered sets.
        self._last: dict[str, bytes] = {}
        self._replaced: dict[Start, None] = {}

    def join(self, instance: Instance) -> tuple[Member, tuple[Member, IsthmusError] | None]:
        """Admit an instance. Returns the member and, when its name was taken, the member it pushed out with the error
        that ends that one's stream. Raises InstanceReplaced for a start that was replaced before."""
        if instance.start in self._replaced:
            raise InstanceReplaced(instance.instance_id)
        name = instance.instance_id
        last = self._last.pop(name, None)
        self._last[name] = instance.incarnation
        if last is not None and last != instance.incarnation:
            self._replaced[Start(name, last)] = None
        _forget_oldest(self._last)
        _forget_oldest(self._replaced)
        old = self._members.get(name)
        if old is not None:
            del self._members[name]
            heapq.heappush(self._free, old.number)
        # The lowest free number, so that arrays stay short.
        number = heapq.heappop(self._free) if self._free else len(self._members)
        member = self._members[name] = Member(next(self._tokens), number, instance)
        if old is None:
            return member, None
        same = old.instance.incarnation == instance.incarnation
        return member, (old, StreamReplaced(f"instance {name}") if same else InstanceReplaced(name))

    def leave(self, member: Member) -> bool:
        """Forget a member. False when it has been replaced before."""
        if not self.has(member):
            return False
        del self._members[member.instance.instance_id]
        heapq.heappush(self._free, member.number)
        return True

    def has(self, member: Member) -> bool:
        """True until the member leaves or is replaced."""
        return self._members.get(member.instance.instance_id) is member

    def get(self, instance_id: str) -> Member | None:
        """The member of that name."""
        return self._members.get(instance_id)

    def __iter__(self) -> Iterator[Member]:
        """Members by instance id, so that every listing has one order."""
        return iter([self._members[name] for name in sorted(self._members)])

    def __len__(self) -> int:
        return len(self._members)

    def of_model(self, model: str) -> list[Member]:
        """Members that serve a model, by instance id."""
        return [member for member in self if member.instance.model == model]

    def models(self) -> list[str]:
        """Names of the models of all members, sorted."""
        return sorted({member.instance.model for member in self._members.values()})


def _forget_oldest(seen: dict[K, V]) -> None:
    if len(seen) > _MAX_REPLACED:
        del seen[next(iter(seen))]
