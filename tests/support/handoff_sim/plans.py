"""Plans are made once per pair of page tables; those are the same in every schedule, and planning costs most."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from kvtransfer import compatibility, peer_plan
from kvtransfer.page_table import PageTable
from kvtransfer.rank_info import InstanceInfo, RankInfo
from kvtransfer.transfer import Transfer

_REMEMBERED = (
    peer_plan.build_instance_plans,
    peer_plan.build_rank_plans,
    peer_plan.build_source_plans,
    peer_plan.plan_digest,
    peer_plan.expected_need,
    peer_plan.rank_digest,  # pyright: ignore[reportPrivateImportUsage]
    compatibility.check_compatible,
    compatibility.check_rank,
)
# Answers of each function that are kept, and names of instances.
_MOST, _MOST_NAMED = 1 << 17, 256
_named: dict[int, tuple[InstanceInfo, object]] = {}


def _name(value: object) -> object:
    """What a result depends on, hashable. Page tables are told apart by where their memory lies."""
    if isinstance(value, InstanceInfo):
        # Kept together with its name: as long as it lives nobody else has its id.
        if id(value) not in _named:
            if len(_named) >= _MOST_NAMED:
                _named.clear()
            _named[id(value)] = value, (value.role, value.model, tuple(_name(rank) for rank in value.ranks))
        return _named[id(value)][1]
    if isinstance(value, RankInfo):
        return value.rank, value.agent.backend, value.page_table.regions[0].base_address
    if isinstance(value, PageTable):
        return value.regions[0].base_address
    if isinstance(value, list | tuple):
        return tuple(map(_name, cast("Sequence[object]", value)))
    if isinstance(value, dict):
        return tuple((place, _name(one)) for place, one in cast("dict[object, object]", value).items())
    return value.tobytes() if isinstance(value, np.ndarray) else value


def _remember(function: Callable[..., Any], made: dict[object, object]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **options: Any) -> Any:
        place = tuple(map(_name, (*arguments, *options.values())))
        if place not in made:
            if len(made) >= _MOST:
                made.clear()
            made[place] = function(*arguments, **options)
        return made[place]

    return wrapper


@contextmanager
def plans_made_once() -> Generator[None]:
    """While open, the functions that make and compare plans remember their answers, wherever kvtransfer uses them."""
    with pytest.MonkeyPatch.context() as patch:
        for function in _REMEMBERED:
            remembered = _remember(function, {})
            for module in [one for name, one in sys.modules.items() if name.startswith("kvtransfer")]:
                for name, value in list(vars(module).items()):
                    if value is function:
                        patch.setattr(module, name, remembered)
        for owner, name in ((PageTable, "validate"), (peer_plan.PeerPlan, "resolve"), (Transfer, "pairs")):
            patch.setattr(owner, name, _remember(getattr(owner, name), {}))
        yield
