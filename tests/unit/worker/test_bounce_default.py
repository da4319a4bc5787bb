"""Arenas are there unless they are switched off, and a size that can not work is refused with the least one."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_core.config import IsthmusConfig
from isthmus_worker.engine_process.bouncing import bounce_policy
from kvtransfer.errors import ArenaError
from kvtransfer.page_table import MemoryKind, RegisteredRegion

MIB = 1 << 20
CACHE = np.zeros(4096, np.uint8)
REGION = RegisteredRegion(int(CACHE.ctypes.data), CACHE.nbytes, MemoryKind.DRAM)


def _config(role: str = "context", **transfer: object) -> IsthmusConfig:
    return IsthmusConfig.model_validate({"worker": {"role": role}, "transfer": {"backend": "nixl", **transfer}})


@pytest.mark.parametrize(("peers", "size"), [(4, 64 * MIB), (64, 64 * MIB), (200, 200 * MIB)])
def test_an_arena_is_sized_for_the_peers(peers: int, size: int):
    policy, keep = bounce_policy(_config(max_peers=peers), REGION)
    assert policy.send is not None
    assert policy.send.size_bytes == size
    assert policy.receive is None
    assert len(keep) == 1


def test_a_generation_rank_only_receives():
    policy, _ = bounce_policy(_config("generation"), REGION)
    assert policy.send is None
    assert policy.receive is not None


def test_nothing_is_bounced_without_memory_for_it():
    policy, keep = bounce_policy(_config(arena_bytes=0), REGION)
    assert policy.regions == ()
    assert keep == []


def test_an_arena_that_is_too_small_for_the_peers_names_the_least_size():
    with pytest.raises(ArenaError, match=f"the least is {64 * MIB} bytes .transfer.arena_bytes, transfer.max_peers"):
        bounce_policy(_config(arena_bytes=64 * MIB - 1), REGION)
