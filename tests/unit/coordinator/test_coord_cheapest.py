"""The search for the cheapest pair looks at few of them, and finds what looking at all of them does."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_coordinator.costs import Costs, Pick, cheapest
from isthmus_coordinator.fleet import Group, View

EMPTY = Group(())


def group(size: int) -> Group:
    """Members of whom only the number counts."""
    return Group((object(),) * size)  # type: ignore[arg-type]


def search(ready: np.ndarray, cost: Costs) -> Pick | None:
    contexts, generations = (group(size) for size in ready.shape)
    view = View(contexts, generations, EMPTY, EMPTY, ready, None, None)
    return cheapest(view, cost, turn=3)


@pytest.mark.parametrize("share", [0.0, 0.002, 0.03, 0.3, 1.0])
@pytest.mark.parametrize("pairs", [False, True])
def test_it_is_as_cheap_as_the_cheapest_of_all(share: float, pairs: bool):
    draw = np.random.default_rng(int(share * 1000) + pairs)
    for _ in range(20):
        shape = (int(draw.integers(1, 90)), int(draw.integers(1, 90)))
        ready = draw.random(shape) < share
        hand_off = draw.random(shape) * 50 if pairs else None
        cost = Costs(draw.random(shape[0]) * 100, draw.random(shape[1]) * 100, np.empty(0), hand_off)
        every = np.where(ready, cost.context[:, None] + cost.generation + (0 if hand_off is None else hand_off), np.inf)
        pick = search(ready, cost)
        if np.isinf(every.min()):
            assert pick is None
        else:
            assert pick is not None
            assert ready[pick.context, pick.generation]
            assert every[pick.context, pick.generation] == pytest.approx(every.min())
