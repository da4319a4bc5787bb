"""Plans are made once per pair of page tables; those are the same in every schedule, and planning costs most."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from isthmus.v1 import kv_pb2

from kvtransfer import compatibility, packing, peer_plan
from kvtransfer.page_table import PageTable
from kvtransfer.rank_info import InstanceInfo, RankInfo
from kvtransfer.transfer import Transfer
from kvtransfer.wire import page_tables

_REMEMBERED = (
    peer_plan.build_instance_plans,
    peer_plan.build_rank_plans,
    peer_plan.build_source_plans,
    peer_plan.plan_digest,
    peer_plan.expected_need,
    peer_plan.rank_digest,  # pyright: ignore[reportPrivateImportUsage]
    compatibility.check_compatible,
    compatibility.check_rank,
    packing.pack_located,
    packing.pack_destination,
    page_tables.page_table_to_pb,
    page_tables.page_table_from_pb,
)
_REMEMBERED_METHODS = (
    (PageTable, "validate"),
    (peer_plan.PeerPlan, "locate"),
    (peer_plan.PeerPlan, "moves"),
    (peer_plan.PeerPlan, "check_destination"),
    (peer_plan.PeerPlan, "extents"),
    (Transfer, "pairs"),
)
# Answers of each function that are kept, and names of instances.
_MOST, _MOST_NAMED = 1 << 17, 256
_named: dict[int, tuple[InstanceInfo, object]] = {}


def _named_instance(value: InstanceInfo) -> object:
    # Kept together with its name: as long as it lives nobody else has its id.
    known = _named.get(id(value))
    if known is None:
        if len(_named) >= _MOST_NAMED:
            _named.clear()
        known = _named[id(value)] = value, (value.role, value.model, tuple(map(_name, value.ranks)))
    return known[1]


def _named_rank(value: RankInfo) -> object:
    return value.rank, value.agent.backend, value.page_table.regions[0].base_address


def _named_table(value: PageTable) -> object:
    return value.regions[0].base_address


def _named_all(values: Iterable[object]) -> object:
    return tuple(map(_name, values))


def _named_items(values: dict[object, object]) -> object:
    return tuple((place, _name(one)) for place, one in values.items())


# What a result depends on, hashable, by type; all other values name themselves.
_HOW: dict[type, Callable[[Any], object]] = {
    InstanceInfo: _named_instance,
    RankInfo: _named_rank,
    # Told apart by where their memory lies.
    PageTable: _named_table,
    list: _named_all,
    tuple: _named_all,
    type(dict[object, object]().values()): _named_all,
    dict: _named_items,
    kv_pb2.PageTable: kv_pb2.PageTable.SerializeToString,
    np.ndarray: np.ndarray.tobytes,
}


def _name(value: object) -> object:
    how = _HOW.get(type(value))
    return value if how is None else how(value)


def _remember(function: Callable[..., Any], made: dict[object, object]) -> Callable[..., Any]:
    def wrapper(*arguments: Any, **options: Any) -> Any:
        place = tuple([_name(one) for one in (*arguments, *options.values())])
        try:
            return made[place]
        except KeyError:
            if len(made) >= _MOST:
                made.clear()
            found = made[place] = function(*arguments, **options)
            return found

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
        for owner, name in _REMEMBERED_METHODS:
            patch.setattr(owner, name, _remember(getattr(owner, name), {}))
        yield
