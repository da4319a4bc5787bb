"""Arenas are there unless they are switched off, and a size that can not work is refused with the least one."""

from __future__ import annotations

import numpy as np
import pytest

from isthmus_core.config import IsthmusConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.engine_process.bouncing import bounce_settings
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.bounce.settings import BounceSettings
from kvtransfer.errors import ArenaError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.transceiver.rank_memory import bounce_policy

MIB = 1 << 20
CACHE = np.zeros(4096, np.uint8)
REGION = RegisteredRegion(int(CACHE.ctypes.data), CACHE.nbytes, MemoryKind.DRAM)


def _config(**transfer: object) -> IsthmusConfig:
    return IsthmusConfig.model_validate({"transfer": {"backend": "nixl", **transfer}})


def _made(role: str = "context", **transfer: object) -> tuple[BouncePolicy, list[object]]:
    settings, sends = bounce_settings(_config(**transfer)), role == "context"
    return bounce_policy(settings, REGION, sends=sends, receives=not sends)


@pytest.mark.parametrize(("peers", "size"), [(4, 64 * MIB), (64, 64 * MIB), (200, 200 * MIB)])
def test_an_arena_is_sized_for_the_peers(peers: int, size: int):
    policy, keep = _made(max_peers=peers)
    assert policy.send is not None
    assert policy.send.size_bytes == size
    assert policy.receive is None
    assert len(keep) == 1


def test_a_generation_rank_only_receives():
    policy, _ = _made("generation")
    assert policy.send is None
    assert policy.receive is not None


def test_nothing_is_bounced_without_memory_for_it():
    policy, keep = _made(arena_bytes=0)
    assert policy.regions == ()
    assert keep == []


def test_an_arena_that_is_too_small_for_the_peers_names_the_least_size():
    with pytest.raises(ConfigError, match=f"the least is {64 * MIB} bytes .transfer.arena_bytes, transfer.max_peers"):
        bounce_settings(_config(arena_bytes=64 * MIB - 1))


def test_every_engine_reads_the_same_words():
    """vLLM's connector gets them in kv_connector_extra_config, beside its own."""
    given = {"staging_policy": "always", "arena_bytes": 3 * MIB, "bounce_depth": 2, "cost_file": "/costs"}
    settings = bounce_settings(_config(max_peers=2, bounce_chunk_bytes=MIB, **given))
    assert settings.words == {**given, "bounce_chunk_bytes": MIB}
    assert BounceSettings.from_words({**settings.words, "repack": True}, 2, "x") == settings
    assert BounceSettings.from_words({}, 64, "x") == bounce_settings(_config())


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("staging_policy", "sometimes", "write one of cost, blocks_96"),
        ("arena_bytes", "64MiB", "write a whole number from 0"),
        ("arena_bytes", -1, "write a whole number from 0"),
        ("bounce_chunk_bytes", MIB - 1, f"write a whole number from {MIB}"),
        ("bounce_depth", 0, "write a whole number from 1 to 64"),
        ("bounce_depth", True, "write a whole number from 1 to 64"),
        ("cost_file", "", "write the name of a file"),
    ],
)
def test_words_that_make_no_sense_are_named(key: str, value: object, remedy: str):
    with pytest.raises(ArenaError, match=f"extra.{key} = {value!r}: {remedy}"):
        BounceSettings.from_words({key: value}, 1, "extra")
