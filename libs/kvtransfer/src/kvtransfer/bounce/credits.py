"""Who may put a chunk into an arena: every connected user keeps one unit, the rest goes in order of asking. Pure.

    ask ─▶ waiting ── room ─▶ granted(offset, bytes) ── give_back ─▶ free
              └── drop ─▶ nothing is held
    take_now ── room ─▶ granted, loose ── keep ─▶ granted

A waiting request holds nothing, and a user that holds nothing can always get one unit: so a chunk waits for others that
only wait for a copy, and scarce space delays but never blocks.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvtransfer.bounce.arena import Arena, check_room
from kvtransfer.errors import ArenaError

U = TypeVar("U", bound=Hashable)
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """A granted chunk: where it lies in the arena, and how much of what was asked for."""

    ticket: T
    offset: int
    nbytes: int


class Credits(Generic[U, T]):
    """`unit_bytes`: what every user is sure of. `users`: how many can be connected at once.

    Raises ArenaError naming the smallest size that would do when the arena can not hold a unit for each of them.
    """

    def __init__(self, size_bytes: int, unit_bytes: int, users: int) -> None:
        check_room("an arena", size_bytes, unit_bytes, users)
        self._arena, self._unit = Arena(size_bytes, unit_bytes), unit_bytes
        self._largest = unit_bytes << (self._arena.units.bit_length() - 1)
        self._holds: dict[U, int] = {}
        # Disconnected, but not without memory yet.
        self._leaving: set[U] = set()
        self._waiting: dict[T, tuple[U, int]] = {}
        self._granted: dict[T, tuple[U, Given[T]]] = {}
        # Units of those that may wait for somebody else.
        self._loose: dict[T, int] = {}

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        return self._arena.free_units * self._unit

    @property
    def is_idle(self) -> bool:
        """True when nothing is granted and nothing waits."""
        return not self._granted and not self._waiting

    @property
    def granted(self) -> tuple[T, ...]:
        """Tickets that hold a part of the arena, oldest first."""
        return tuple(self._granted)

    def connect(self, user: U) -> None:
        """From now on a unit is kept for the user. Nothing happens for one that is connected."""
        self._leaving.discard(user)
        self._holds.setdefault(user, 0)

    def disconnect(self, user: U) -> None:
        """What it waits for is dropped; what it holds stays taken until it comes back. Nothing is kept for it then."""
        for ticket in [one for one, (who, _) in self._waiting.items() if who == user]:
            del self._waiting[ticket]
        if self._holds.get(user):
            self._leaving.add(user)
        else:
            self._holds.pop(user, None)

    def ask(self, user: U, ticket: T, nbytes: int) -> None:
        """Queues a request for `nbytes`. Raises ArenaError for a ticket that is in use."""
        if ticket in self._waiting or ticket in self._granted:
            raise ArenaError(f"chunk {ticket} has been asked for already")
        if nbytes <= 0:
            raise ArenaError(f"chunk {ticket} has {nbytes} bytes")
        self.connect(user)
        self._waiting[ticket] = (user, min(nbytes, self._largest))

    def take_now(self, user: U, ticket: T, nbytes: int) -> Given[T] | None:
        """Room at once or not at all, for a chunk that may go on to wait for somebody else while it holds it. All of
        these together hold half of the arena at most: those that wait for nobody find room, and come to their end. None
        while others wait."""
        units = self._arena.units_of(nbytes)
        if self._waiting or sum(self._loose.values()) + units > self._arena.units // 2:
            return None
        self.connect(user)
        if self._room(user, units, at_once=False) != units:
            return None
        self._loose[ticket] = units
        return self._give(user, ticket, units, nbytes)

    def keep(self, ticket: T) -> None:
        """The chunk waits for nobody any more."""
        self._loose.pop(ticket, None)

    def drop(self, ticket: T) -> None:
        """A waiting request is not wanted any more. Nothing happens for others."""
        self._waiting.pop(ticket, None)

    def knows(self, ticket: T) -> bool:
        """True when the chunk waits or is granted."""
        return ticket in self._waiting or ticket in self._granted

    def names(self) -> tuple[T, ...]:
        """Tickets that wait or are granted."""
        return (*self._waiting, *self._granted)

    def find(self, ticket: T) -> Given[T] | None:
        """What was granted and not given back."""
        granted = self._granted.get(ticket)
        return None if granted is None else granted[1]

    def give_back(self, ticket: T) -> None:
        """Nothing can touch the chunk any more. Nothing happens for one that is not granted."""
        granted = self._granted.pop(ticket, None)
        if granted is None:
            return
        user, given = granted
        self._loose.pop(ticket, None)
        self._arena.give_back(given.offset)
        self._holds[user] -= 1
        if user in self._leaving and not self._holds[user]:
            self._leaving.discard(user)
            del self._holds[user]

    def give(self) -> list[Given[T]]:
        """Grants what there is room for, in order of asking; a user that holds nothing does not wait for those before
        it. A grant may be smaller than asked for: the rest is asked for again."""
        given: list[Given[T]] = []
        blocked = False
        for ticket, (user, nbytes) in tuple(self._waiting.items()):
            if not self._arena.free_units:
                break
            units = self._room(user, self._arena.units_of(nbytes), at_once=blocked)
            if not units:
                blocked = True
                continue
            del self._waiting[ticket]
            given.append(self._give(user, ticket, units, nbytes))
        return given

    def _give(self, user: U, ticket: T, units: int, nbytes: int) -> Given[T]:
        one = Given(ticket, self._arena.take(units), min(nbytes, units * self._unit))
        self._granted[ticket] = (user, one)
        self._holds[user] += 1
        return one

    def _room(self, user: U, wanted: int, *, at_once: bool) -> int:
        """Units that may be taken now, 0 to wait. `at_once`: somebody before it waits: the kept unit is left."""
        kept = sum(1 for other, holds in self._holds.items() if other != user and not holds)
        room = min(self._arena.free_units - kept, self._arena.largest_free)
        if self._holds[user]:
            if at_once or room < 1:
                return 0
            # What loose chunks hold may stay theirs for long: then less than asked for is better than to wait for it.
            return wanted if wanted <= room else 1 << (room.bit_length() - 1) if self._loose else 0
        if at_once:
            return min(1, self._arena.free_units)
        if room < 1:
            return min(1, self._arena.free_units)
        return min(wanted, 1 << (room.bit_length() - 1))
