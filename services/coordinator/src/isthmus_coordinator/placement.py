"""Where a request goes: what it asks for, the choice among what can be used, and why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from isthmus_coordinator.costs import Ask, Kind, Loads, Pick, Weights
from isthmus_coordinator.fleet import Ints, View
from isthmus_coordinator.load import LegLoad
from isthmus_coordinator.membership import Instance, Member, Role
from isthmus_coordinator.pairs import Pairs, PairState
from isthmus_coordinator.policies import Policy, choose, explain
from isthmus_coordinator.prefix import PrefixIndex
from isthmus_core.block_keys import Keying
from isthmus_core.errors import InvalidRequest, NoCapacity
from isthmus_core.keys import RequestKey

# Pairs named in a refusal; a cluster can have thousands.
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True)
class Question:
    """One request. `keys`: keys of its blocks by keying id; `affinity`: names its conversation, b"" for none;
    `kinds`: empty for all; `excluded`: incarnations; `local_tokens`: see LOCAL_PREFILL."""

    key: RequestKey
    model: str
    prompt_tokens: int
    max_tokens: int
    keys: Mapping[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    affinity: bytes = b""
    kinds: frozenset[Kind] = frozenset()
    excluded: frozenset[bytes] = frozenset()
    local_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request goes. `context` None: `generation` does everything."""

    context: Instance | None
    generation: Instance


@dataclass(frozen=True, slots=True)
class Choice:
    """A placement, why, and among how many it was chosen. Cached tokens: what is believed to be there."""

    placement: Placement
    pick: Pick
    candidates: int
    context_cached: int
    generation_cached: int
    transfer_s: float | None
    legs: tuple[LegLoad, ...]


@dataclass(frozen=True, slots=True)
class Served:
    """A model that can be served now. `max_model_len`: prompt plus output in tokens, on every usable placement.
    `keyings`: how its instances name blocks."""

    name: str
    max_model_len: int
    keyings: tuple[Keying, ...] = ()


def place(
    policy: Policy, weights: Weights, view: View, loads: Loads, index: PrefixIndex, question: Question, turn: int
) -> Choice | None:
    """The choice for one request, or None when nothing is usable.

    Raises InvalidRequest when nothing usable is long enough: another try would not change that.
    """
    if not view.placements and not (question.local_tokens and len(view.receivers)):
        return None
    fitting = _fitting(view, question)
    if not fitting.placements and not len(fitting.receivers):
        return None
    cached = None
    if question.keys and policy.wants_keys:
        cached = _cached(fitting, len(loads.prefill), index, question)
    name = int.from_bytes(question.affinity[:8], "little") if question.affinity else None
    ask = Ask(question.prompt_tokens, question.max_tokens, turn, cached, name)
    pick = choose(policy, fitting, loads, ask, weights, question.local_tokens)
    return None if pick is None else _choice(explain(pick, fitting, loads, ask, weights), fitting, ask, weights)


def _choice(pick: Pick, view: View, ask: Ask, weights: Weights) -> Choice:
    split = pick.kind is Kind.SPLIT
    group = view.generations if split else view.receivers if pick.kind is Kind.LOCAL_PREFILL else view.whole
    second = group.members[pick.generation]
    first = view.contexts.members[pick.context] if split else second
    here, there = (0, 0) if ask.cached is None else (int(ask.cached[first.number]), int(ask.cached[second.number]))
    missing, tokens = ask.prompt_tokens - here, ask.prompt_tokens + ask.max_tokens
    one = LegLoad(first.instance.start, missing, tokens)
    legs = (one, LegLoad(second.instance.start, 0, tokens)) if split else (one,)
    known = split and view.fixed_s is not None
    return Choice(
        placement=Placement(first.instance if split else None, second.instance),
        pick=pick,
        candidates=view.placements,
        context_cached=here,
        generation_cached=there,
        transfer_s=pick.transfer / weights.prefill_tokens_per_s if known else None,
        legs=legs,
    )


def _cached(view: View, size: int, index: PrefixIndex, question: Question) -> Ints:
    """Prompt tokens that each member has cached, by member number. The last token is always computed."""
    cached = np.zeros(size, dtype=np.int64)
    for name, data in question.keys.items():
        keying = view.keyings.get(name)
        if keying is not None:
            # Keys of different keyings differ, so that nobody is counted twice.
            cached += index.reuse(data, size) * keying.tokens_per_block
    return np.minimum(cached, question.prompt_tokens - 1, out=cached)


def _fitting(view: View, question: Question) -> View:
    """What is long enough for a request and not ruled out by it. Raises InvalidRequest."""
    kinds, tokens = question.kinds, question.prompt_tokens + question.max_tokens
    if kinds and not {Kind.SPLIT, Kind.UNSPLIT} <= kinds:
        view = view.only(split=Kind.SPLIT in kinds, whole=Kind.UNSPLIT in kinds)
    if view.placements and tokens > view.shortest:
        longest = view.longest
        if tokens > longest:
            raise InvalidRequest(
                "max_tokens",
                str(tokens),
                f"prompt and output of model {question.model} may have at most {longest} tokens together",
            )
        view = view.only(lambda member: member.instance.max_model_len >= tokens)
    if question.excluded:
        view = view.only(lambda member: member.instance.incarnation not in question.excluded)
    return view


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
