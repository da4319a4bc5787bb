"""The instances of one model as arrays: who may be used, how long requests may be, which pairs are ready.

`Fleet` follows the members and the pair reports, one cell at a time; `View` is what a policy looks at: usable instances
only, without holes. Making one copies a few arrays and is done once for each change, not for each request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_digest

from isthmus_coordinator.membership import Member, Role
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_core.block_keys import Keying

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
_FIRST = 8


@dataclass(frozen=True)
class Group:
    """Usable instances of one role. `numbers`: their places in arrays by member; `lengths`: longest prompt plus
    output; `capacity`: tokens that their KV blocks take; `identities`: 64 bits, the same at a restarted coordinator."""

    members: tuple[Member, ...]

    @cached_property
    def numbers(self) -> Ints:
        return np.array([member.number for member in self.members], dtype=np.int64)

    @cached_property
    def lengths(self) -> Ints:
        return np.array([member.instance.max_model_len for member in self.members], dtype=np.int64)

    @cached_property
    def capacity(self) -> Floats:
        blocks = [member.instance.total_blocks * member.instance.tokens_per_block for member in self.members]
        return np.array(blocks, dtype=np.float64)

    @cached_property
    def identities(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(
            b"".join(xxh3_64_digest(one.instance.instance_id.encode()) for one in self.members), dtype="<u8"
        )

    @cached_property
    def keyings(self) -> frozenset[Keying]:
        """How they name their blocks."""
        return frozenset(one.instance.keying for one in self.members if one.instance.keying is not None)

    def only(self, indices: npt.NDArray[np.intp]) -> Group:
        """Those with the indices."""
        chosen: list[int] = indices.tolist()
        return Group(tuple(self.members[index] for index in chosen))

    def __len__(self) -> int:
        return len(self.members)


@dataclass(frozen=True)
class View:
    """What can be used now. `ready[c, g]`; every context and generation instance has a ready partner. `fixed_s[c, g]`
    and `token_s[c, g]`: what a hand-off takes; None when no pair was measured. `receivers`: generation instances, those
    without a partner too."""

    contexts: Group
    generations: Group
    whole: Group
    receivers: Group
    ready: Bools
    fixed_s: Floats | None
    token_s: Floats | None

    @cached_property
    def placements(self) -> int:
        """How many there are."""
        return int(self.ready.sum()) + len(self.whole)

    @cached_property
    def shortest(self) -> int:
        """What fits every placement, in tokens of prompt plus output."""
        groups = (self.contexts, self.generations, self.whole)
        return min(int(group.lengths.min()) for group in groups if len(group))

    @cached_property
    def keyings(self) -> dict[bytes, Keying]:
        """How instances name their blocks, by keying id."""
        groups = (self.contexts, self.whole, self.receivers)
        return {keying.keying_id: keying for group in groups for keying in group.keyings}

    @cached_property
    def longest(self) -> int:
        """What fits some placement, in tokens of prompt plus output."""
        pairs = np.minimum.outer(self.contexts.lengths, self.generations.lengths)[self.ready]
        return int(max(pairs.max(initial=0), self.whole.lengths.max(initial=0)))

    def only(self, wanted: Callable[[Member], bool] | None = None, *, split: bool = True, whole: bool = True) -> View:
        """A part of it: some members, pairs or not, `whole` or not. `receivers` are narrowed with the members."""

        def marks(group: Group) -> Bools:
            return np.array([wanted is None or wanted(member) for member in group.members], dtype=bool)

        ready = self.ready & split & np.outer(marks(self.contexts), marks(self.generations))
        rows, columns = np.flatnonzero(ready.any(axis=1)), np.flatnonzero(ready.any(axis=0))
        cells = np.ix_(rows, columns)
        return View(
            contexts=self.contexts.only(rows),
            generations=self.generations.only(columns),
            whole=self.whole.only(np.flatnonzero(marks(self.whole) & whole)),
            receivers=self.receivers.only(np.flatnonzero(marks(self.receivers))),
            ready=self.ready[cells] & ready[cells],
            fixed_s=None if self.fixed_s is None else self.fixed_s[cells],
            token_s=None if self.token_s is None else self.token_s[cells],
        )

    @cached_property
    def all_ready(self) -> bool:
        """Whether every pair is."""
        return bool(self.ready.all())


class _Slots:
    """Members of one role, each at one index for its life."""

    def __init__(self) -> None:
        self.members: list[Member | None] = []
        self.at: dict[int, int] = {}

    def put(self, member: Member) -> int:
        index = self.members.index(None) if None in self.members else len(self.members)
        if index == len(self.members):
            self.members.append(None)
        self.members[index] = member
        self.at[member.token] = index
        return index

    def take(self, member: Member) -> int:
        index = self.at.pop(member.token)
        self.members[index] = None
        return index

    def usable(self) -> list[int]:
        return [index for index, member in enumerate(self.members) if member is not None and member.usable]


class Fleet:
    """The members of one model."""

    def __init__(self) -> None:
        self._sides = {role: _Slots() for role in Role}
        self._ready: Bools = np.zeros((_FIRST, _FIRST), dtype=bool)
        # NaN: nothing known.
        self._fixed: Floats = np.full((_FIRST, _FIRST), np.nan)
        self._token: Floats = np.full((_FIRST, _FIRST), np.nan)
        # Whether any pair ever was: else large arrays need not be looked through.
        self._measured = False
        self._view: View | None = None
        self._groups: deque[Group] = deque(maxlen=8)

    def __len__(self) -> int:
        return sum(len(side.at) for side in self._sides.values())

    def members(self, role: Role) -> list[Member]:
        """Members of a role, draining ones too, by instance id."""
        found = [member for member in self._sides[role].members if member is not None]
        return sorted(found, key=lambda member: member.instance.instance_id)

    def add(self, member: Member) -> None:
        """A new member; no pair of it is ready."""
        self._view = None
        index = self._sides[member.role].put(member)
        if index >= len(self._ready):
            self._grow()
        self._clear(member.role, index)

    def remove(self, member: Member) -> None:
        """A member is gone, or is about to have another role."""
        self._view = None
        self._clear(member.role, self._sides[member.role].take(member))

    def changed(self) -> None:
        """A member drains, or may be used again."""
        self._view = None

    def set_pair(self, context: Member, generation: Member, pair: Pair) -> None:
        """What is known about two members now."""
        self._view = None
        at = self._sides[Role.CONTEXT].at[context.token], self._sides[Role.GENERATION].at[generation.token]
        self._ready[at] = pair.state is PairState.READY
        known = pair.estimate
        self._measured |= known is not None
        self._fixed[at], self._token[at] = (np.nan, np.nan) if known is None else (known.fixed_s, known.s_per_token)

    def ready_contexts(self, generation: Member) -> list[Member]:
        """Context instances that it has a ready stream to."""
        column = self._ready[:, self._sides[Role.GENERATION].at[generation.token]]
        slots = self._sides[Role.CONTEXT].members
        return [member for index in np.flatnonzero(column).tolist() if (member := slots[index]) is not None]

    def view(self) -> View:
        """What can be used now."""
        if self._view is None:
            self._view = self._make_view()
        return self._view

    def _make_view(self) -> View:
        contexts, generations = self._sides[Role.CONTEXT].usable(), self._sides[Role.GENERATION].usable()
        ready = self._ready[np.ix_(contexts, generations)]
        receivers = self._group(Role.GENERATION, generations)
        contexts = [contexts[at] for at in np.flatnonzero(ready.any(axis=1)).tolist()]
        generations = [generations[at] for at in np.flatnonzero(ready.any(axis=0)).tolist()]
        cells = np.ix_(contexts, generations)
        return View(
            contexts=self._group(Role.CONTEXT, contexts),
            generations=self._group(Role.GENERATION, generations),
            whole=self._group(Role.CONTEXT_AND_GENERATION, self._sides[Role.CONTEXT_AND_GENERATION].usable()),
            receivers=receivers,
            ready=self._ready[cells],
            fixed_s=_filled(self._fixed[cells]) if self._measured else None,
            token_s=_filled(self._token[cells]) if self._measured else None,
        )

    def _group(self, role: Role, indices: Sequence[int]) -> Group:
        members = self._sides[role].members
        chosen = tuple(member for index in indices if (member := members[index]) is not None)
        # Most changes are of a pair: groups keep their arrays then.
        for known in self._groups:
            if known.members == chosen:
                return known
        self._groups.append(Group(chosen))
        return self._groups[-1]

    def _clear(self, role: Role, index: int) -> None:
        cells = (index, slice(None)) if role is Role.CONTEXT else (slice(None), index)
        if role is not Role.CONTEXT_AND_GENERATION:
            self._ready[cells] = False
            self._fixed[cells] = self._token[cells] = np.nan

    def _grow(self) -> None:
        more = ((0, len(self._ready)), (0, len(self._ready)))
        self._ready = np.pad(self._ready, more)
        self._fixed = np.pad(self._fixed, more, constant_values=np.nan)
        self._token = np.pad(self._token, more, constant_values=np.nan)


def _filled(known: Floats) -> Floats | None:
    """Pairs that nobody has measured are taken for average ones, neither better nor worse. None when all are such."""
    unknown = np.isnan(known)
    if unknown.all():
        return None
    return np.where(unknown, known[~unknown].mean(), known)
