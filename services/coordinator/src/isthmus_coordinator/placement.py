"""Where a request goes: the usable placements of a model, one after the other, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_coordinator.membership import Instance, Member, Role, Start
from isthmus_coordinator.pairs import Pairs, PairState
from isthmus_core.errors import InvalidRequest, NoCapacity

POLICY = "round_robin"
# Pairs named in a refusal; a cluster can have thousands.
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `context` None: `generation` does everything."""

    context: Instance | None
    generation: Instance

    @property
    def starts(self) -> tuple[Start, ...]:
        """The instances that carry its load."""
        if self.context is None:
            return (self.generation.start,)
        return (self.context.start, self.generation.start)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens."""
        own = self.generation.max_model_len
        return own if self.context is None else min(own, self.context.max_model_len)


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be served now. `max_model_len`: prompt plus output in tokens, on every usable placement."""

    name: str
    max_model_len: int


def usable(members: Sequence[Member], pairs: Pairs) -> tuple[Placement, ...]:
    """Usable placements among the members of one model: ready pairs, and instances that do everything. No draining one.

    Pairs come by diagonals (c0 g0, c1 g1, ..., c0 g1, c1 g2, ...), so that neighbours in the list load different
    instances.
    """
    active = [member for member in members if not member.draining]
    contexts = [member for member in active if member.instance.role is Role.CONTEXT]
    generations = [member for member in active if member.instance.role is Role.GENERATION]
    longer = max(len(contexts), len(generations), 1)
    diagonals = (
        (contexts[first], generations[(first + shift) % longer])
        for shift in range(longer)
        for first in range(len(contexts))
        if (first + shift) % longer < len(generations)
    )
    placements = [
        Placement(context.instance, generation.instance)
        for context, generation in diagonals
        if pairs.state(context, generation).state is PairState.READY
    ]
    whole = [member.instance for member in active if member.instance.role is Role.CONTEXT_AND_GENERATION]
    return (*placements, *(Placement(None, instance) for instance in whole))


def choose(placements: Sequence[Placement], turn: int, tokens: int, model: str) -> Placement:
    """The placement whose turn it is among those that can hold `tokens` (prompt plus output). `placements` not empty.

    Raises InvalidRequest when no placement is long enough: another try would not change that.
    """
    count = len(placements)
    for step in range(count):
        placement = placements[(turn + step) % count]
        if tokens <= placement.max_model_len:
            return placement
    longest = max(placement.max_model_len for placement in placements)
    raise InvalidRequest(
        "max_tokens", str(tokens), f"prompt and output of model {model} may have at most {longest} tokens together"
    )


def no_capacity(model: str, members: Sequence[Member], pairs: Pairs) -> NoCapacity:
    """Why no placement of a model is usable, for people."""
    parts = [_count(members, Role.CONTEXT, "context instance"), _count(members, Role.GENERATION, "generation instance")]
    if any(member.instance.role is Role.CONTEXT_AND_GENERATION for member in members):
        parts.append(_count(members, Role.CONTEXT_AND_GENERATION, "context_and_generation instance"))
    active = [member for member in members if not member.draining]
    problems = [
        problem
        for context in active
        if context.instance.role is Role.CONTEXT
        for generation in active
        if generation.instance.role is Role.GENERATION and (problem := _problem(context, generation, pairs))
    ]
    named = problems[:_MAX_NAMED]
    if len(problems) > len(named):
        named.append(f"and {len(problems) - len(named)} more pairs")
    return NoCapacity(f"model {model} can not be served now: {', '.join(parts)}{''.join(f'; {one}' for one in named)}")


def _count(members: Sequence[Member], role: Role, name: str) -> str:
    found = [member for member in members if member.instance.role is role]
    draining = sum(member.draining for member in found)
    text = f"{len(found)} {name}{'' if len(found) == 1 else 's'}"
    return f"{text} ({draining} draining)" if draining else text


def _problem(context: Member, generation: Member, pairs: Pairs) -> str | None:
    pair = pairs.state(context, generation)
    names = f"{context.instance.instance_id} and {generation.instance.instance_id}"
    if pair.state is PairState.READY:
        return None
    if pair.state is PairState.CONNECTING:
        return f"{names} are not connected yet"
    reasons = ", ".join(f"{one.field} {one.mine} against {one.yours}" for one in pair.incompatibilities)
    return f"{names} are incompatible: {reasons or 'no reason given'}"
