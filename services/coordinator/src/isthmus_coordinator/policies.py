"""Which placement a request gets, of those that can be used. Pure functions: view, loads and request in, choice out.

    round_robin   every instance in turn
    least_load    the cheapest placement, what is cached not counted
    kv_aware      the cheapest placement
    affinity      the first instances of the conversation's own order that are not overloaded; least_load without one

Every one of them gives a LOCAL_PREFILL placement when the request permits it and a generation instance needs to compute
no more than it permits.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum

import numpy as np

from isthmus_coordinator.costs import (
    Ask,
    Costs,
    Kind,
    Loads,
    Pick,
    Weights,
    cheapest,
    context_costs,
    costs,
    generation_costs,
)
from isthmus_coordinator.fleet import Bools, Floats, Group, View


class Policy(Enum):
    """Names as in the configuration."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOAD = "least_load"
    KV_AWARE = "kv_aware"
    AFFINITY = "affinity"

    @property
    def wants_keys(self) -> bool:
        """Whether it looks at what is cached."""
        return self is Policy.KV_AWARE


def choose(policy: Policy, view: View, loads: Loads, ask: Ask, weights: Weights, local_tokens: int = 0) -> Pick | None:
    """The placement, or None when there is none. `local_tokens`: see LOCAL_PREFILL."""
    if local_tokens and (pick := _local(view, loads, ask, weights, local_tokens)) is not None:
        return pick
    if policy is Policy.ROUND_ROBIN:
        return round_robin(view, ask.turn)
    if policy is Policy.AFFINITY and ask.affinity is not None:
        return affinity(view, loads, ask, weights)
    if policy is not Policy.KV_AWARE:
        ask = replace(ask, cached=None)
    return cheapest(view, costs(view, loads, ask, weights), ask.turn)


def round_robin(view: View, turn: int) -> Pick | None:
    """Instances in turn: as many turns go to pairs as the larger side has instances, and one to each of `whole`."""
    contexts, pairs, whole = len(view.contexts), max(len(view.contexts), len(view.generations)), len(view.whole)
    if not pairs + whole:
        return None
    rounds, place = divmod(turn, pairs + whole)
    if place >= pairs:
        return Pick(Kind.UNSPLIT, -1, place - pairs)
    lap, context = divmod(rounds * pairs + place, contexts)
    partners = np.flatnonzero(view.ready[context])
    return Pick(Kind.SPLIT, context, int(partners[(context + lap) % len(partners)]))


def affinity(view: View, loads: Loads, ask: Ask, weights: Weights) -> Pick | None:
    """Rendezvous hashing: every conversation has an order of all instances, which nobody has to remember and which
    loses only the instances that are gone. An overloaded one is passed over."""
    name = np.uint64(ask.affinity or 0)
    load = [loads.prefill.take(group.numbers) for group in (view.contexts, view.whole)]
    heads = np.concatenate([_order(view.contexts, name), _order(view.whole, name)])
    if not len(heads):
        return None
    head = int(np.where(_light(np.concatenate(load), ask.prompt_tokens, weights), heads, 0).argmax())
    if head >= len(view.contexts):
        return Pick(Kind.UNSPLIT, -1, head - len(view.contexts))
    partners = np.flatnonzero(view.ready[head])
    tokens = weights.decode * loads.tokens.take(view.generations.numbers[partners])
    order = _order(view.generations, name)[partners]
    best = np.where(_light(tokens, ask.prompt_tokens, weights), order, 0).argmax()
    return Pick(Kind.SPLIT, head, int(partners[best]))


def _order(group: Group, name: np.uint64) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """A number for each instance, never 0, that is as good as random for every conversation (splitmix64)."""
    mixed = group.identities ^ name
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed ^ (mixed >> np.uint64(31))) | np.uint64(1)


def _light(load: Floats, prompt_tokens: int, weights: Weights) -> Bools:
    """Who is not overloaded; never nobody."""
    return load <= weights.overload * load.mean() + weights.slack_tokens + prompt_tokens


def _local(view: View, loads: Loads, ask: Ask, weights: Weights, local_tokens: int) -> Pick | None:
    group = view.receivers
    if not len(group):
        return None
    missing = np.full(len(group), ask.prompt_tokens)
    if ask.cached is not None:
        missing = missing - ask.cached.take(group.numbers)
    cost = context_costs(group, loads, ask, weights) + generation_costs(group, loads, ask, weights)
    cost = np.where(missing <= local_tokens, cost, np.inf)
    only = Costs(np.empty(0), np.empty(0), cost, None)
    pick = cheapest(view, only, ask.turn)
    return None if pick is None else replace(pick, kind=Kind.LOCAL_PREFILL)


def explain(pick: Pick, view: View, loads: Loads, ask: Ask, weights: Weights) -> Pick:
    """The pick with what it costs, whoever chose it."""
    one = view.receivers if pick.kind is Kind.LOCAL_PREFILL else view.whole
    second = view.generations if pick.kind is Kind.SPLIT else one
    tail = second.numbers[pick.generation]
    head = view.contexts.numbers[pick.context] if pick.kind is Kind.SPLIT else tail
    reuse = 0.0 if ask.cached is None else float(ask.cached[head])
    too_much = max(0.0, float(loads.used[tail] - second.capacity[pick.generation]) + ask.prompt_tokens + 1)
    load = weights.load * float(loads.prefill[head]) + weights.decode * float(loads.tokens[tail]) + too_much
    load += weights.balance * float(loads.recent[head])
    transfer = 0.0
    if pick.kind is Kind.SPLIT and view.fixed_s is not None and view.token_s is not None:
        at = pick.context, pick.generation
        moved = ask.prompt_tokens - (0 if ask.cached is None else int(ask.cached[tail]))
        transfer = float(view.fixed_s[at] + view.token_s[at] * moved) * weights.prefill_tokens_per_s
    cost = ask.prompt_tokens - reuse + load + transfer
    return Pick(pick.kind, pick.context, pick.generation, cost, reuse, load, transfer)
