"""What a placement costs, in prompt tokens to compute; pure functions over arrays. The cheapest one is best.

context     load_weight * waiting prompt tokens + tokens of this prompt that are not cached there
            + balance_weight * tokens lately given to it
generation  decode_weight * open tokens + tokens that must leave before this request fits
pair        tokens that could be computed while the cache is handed off
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from isthmus_coordinator.fleet import Floats, Group, Ints, View

# Instances of a side that are looked at first; how many times as many next, if no pair of them is surely the cheapest.
_NARROW, _WIDER = 8, 4
_NOBODY: Floats = np.empty(0)


class Kind(Enum):
    """How a request is divided. Values are those of `isthmus.v1.PlacementKind`."""

    SPLIT = 1
    UNSPLIT = 2
    LOCAL_PREFILL = 3


@dataclass(frozen=True, slots=True)
class Weights:
    """See `coordinator.placement` of the configuration."""

    load: float = 1.0
    decode: float = 0.05
    balance: float = 0.1
    prefill_tokens_per_s: float = 10_000.0
    overload: float = 1.25
    slack_tokens: float = 4096.0


@dataclass(frozen=True, slots=True)
class Loads:
    """By member number. `prefill`: prompt tokens placed and not computed; `tokens`: prompt and output tokens of open
    requests; `used`: tokens of KV blocks in use, as last reported; `recent`: tokens to compute of the last placements,
    older ones counting less and less."""

    prefill: Floats
    tokens: Floats
    used: Floats
    recent: Floats


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. `cached`: tokens by member number, None when nothing is known. `affinity`: 64 bits that name the
    conversation, None for none."""

    prompt_tokens: int
    max_tokens: int
    turn: int
    cached: Ints | None = None
    affinity: int | None = None


@dataclass(frozen=True, slots=True)
class Pick:
    """Indices into the view's groups. `context` -1: one instance does everything, of `whole` (UNSPLIT) or `receivers`
    (LOCAL_PREFILL). `cost`: in tokens, of which `reuse` was taken off, `load` and `transfer` were added."""

    kind: Kind
    context: int
    generation: int
    cost: float = 0.0
    reuse: float = 0.0
    load: float = 0.0
    transfer: float = 0.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of each usable instance and pair. `pair` None: hand-offs cost nothing that is known."""

    context: Floats
    generation: Floats
    whole: Floats
    pair: Floats | None


def context_costs(group: Group, loads: Loads, ask: Ask, weights: Weights) -> Floats:
    """Work before the first token of this request."""
    cost = loads.prefill.take(group.numbers)
    cost *= weights.load
    cost += ask.prompt_tokens
    if weights.balance:
        recent = loads.recent.take(group.numbers)
        recent *= weights.balance
        cost += recent
    if ask.cached is not None:
        cost -= ask.cached.take(group.numbers)
    return cost


def generation_costs(group: Group, loads: Loads, ask: Ask, weights: Weights) -> Floats:
    """What decoding there costs."""
    cost = loads.tokens.take(group.numbers)
    cost *= weights.decode
    too_much = loads.used.take(group.numbers)
    too_much -= group.capacity
    too_much += ask.prompt_tokens + 1
    cost += np.maximum(too_much, 0.0, out=too_much)
    return cost


def costs(view: View, loads: Loads, ask: Ask, weights: Weights) -> Costs:
    """All of them."""
    pair = None
    if view.fixed_s is not None and view.token_s is not None:
        moved = np.full(len(view.generations), ask.prompt_tokens, dtype=np.float64)
        if ask.cached is not None:
            moved -= ask.cached.take(view.generations.numbers)
        pair = (view.fixed_s + view.token_s * moved) * weights.prefill_tokens_per_s
    whole = _NOBODY
    if len(view.whole):
        whole = context_costs(view.whole, loads, ask, weights) + generation_costs(view.whole, loads, ask, weights)
    return Costs(
        context_costs(view.contexts, loads, ask, weights),
        generation_costs(view.generations, loads, ask, weights),
        whole,
        pair,
    )


def cheapest(view: View, cost: Costs, turn: int) -> Pick | None:
    """The cheapest placement; equal ones take turns. None when every cost is infinite."""
    pair, whole = _cheapest_pair(view, cost, turn), _cheapest_one(cost.whole, turn)
    if whole is not None and (pair is None or cost.whole[whole] < pair.cost):
        return Pick(Kind.UNSPLIT, -1, whole, float(cost.whole[whole]))
    return pair


def _cheapest_one(cost: Floats, turn: int) -> int | None:
    """The first of the cheapest ones, counted from another place each turn; None when all are infinite."""
    count = len(cost)
    if not count:
        return None
    begin = turn % count
    best = begin + int(cost[begin:].argmin())
    if begin and cost[before := int(cost[:begin].argmin())] < cost[best]:
        best = before
    return best if cost[best] < np.inf else None


def _cheapest_pair(view: View, cost: Costs, turn: int) -> Pick | None:
    context = _cheapest_one(cost.context, turn)
    if context is None:
        return None
    if cost.pair is None:
        row = cost.generation if view.all_ready else np.where(view.ready[context], cost.generation, np.inf)
        generation = _cheapest_one(row, turn)
        if generation is not None and (view.all_ready or row[generation] == cost.generation.min()):
            return Pick(Kind.SPLIT, context, generation, float(cost.context[context] + cost.generation[generation]))
    return _search(view, cost)


def _search(view: View, cost: Costs) -> Pick | None:
    """The cheapest pair: among the cheapest few of both sides, then of more, while one beyond them could be cheaper."""
    few = _NARROW
    while True:
        rows, columns = _cheapest_few(cost.context, few), _cheapest_few(cost.generation, few)
        pick, total = _least(view, cost, rows, columns)
        other_context = _next(cost.context, len(rows)) + cost.generation.min()
        other_generation = cost.context.min() + _next(cost.generation, len(columns))
        if total <= min(other_context, other_generation):
            return pick if total < np.inf else None
        few *= _WIDER


def _cheapest_few(cost: Floats, few: int) -> npt.NDArray[np.intp]:
    return np.argpartition(cost, few - 1)[:few] if len(cost) > few else np.arange(len(cost))


def _next(cost: Floats, taken: int) -> float:
    """The cheapest of those that are not among the `taken` cheapest."""
    return float(np.partition(cost, taken)[taken]) if taken < len(cost) else np.inf


def _least(view: View, cost: Costs, rows: npt.NDArray[np.intp], columns: npt.NDArray[np.intp]) -> tuple[Pick, float]:
    cells = np.ix_(rows, columns)
    total = cost.context[rows][:, None] + cost.generation[columns][None, :]
    if cost.pair is not None:
        total = total + cost.pair[cells]
    total = np.where(view.ready[cells], total, np.inf)
    row, column = divmod(int(total.argmin()), len(columns))
    least = float(total[row, column])
    return Pick(Kind.SPLIT, int(rows[row]), int(columns[column]), least), least
