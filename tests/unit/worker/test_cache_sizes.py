"""How the memory of a cache is dealt out to its block lists."""

from __future__ import annotations

import pytest

from isthmus_core.config import EngineConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.cache.layout import CacheOptions, CacheShape, LayerGroups, plan_pools
from isthmus_worker.cache.sizes import cache_blocks
from kvtransfer.page_table import HeadInterval

# Two answers may see 2 * (4 + 2) blocks of 16 tokens, and a step brings 4 more.
SMALL = {"tokens_per_block": 16, "max_running": 2, "max_batch_tokens": 64}


def test_a_number_of_blocks_is_for_every_list_unless_a_window_needs_fewer():
    engine = EngineConfig(num_blocks=100, **SMALL)
    assert cache_blocks(engine, [1000], [None]) == (100,)
    assert cache_blocks(engine, [1000, 1000], [None, 64]) == (100, 16)
    assert cache_blocks(engine, [1000, 1000], [64, None]) == (16, 100)
    assert cache_blocks(engine, [1000], [64]) == (100,), "nobody else would use the rest"


def test_what_a_window_does_not_need_is_for_the_others():
    engine = EngineConfig(kv_cache_bytes=1_000_000, **SMALL)
    full, windowed = cache_blocks(engine, [1000, 3000], [None, 64])
    assert windowed == 16
    assert full == 1000 - 3 * 16
    assert cache_blocks(engine, [1000, 3000], [None, 100_000]) == (250, 250)


def test_a_rank_without_layers_of_a_list_sizes_the_others():
    engine = EngineConfig(kv_cache_bytes=1_000_000, **SMALL)
    assert cache_blocks(engine, [1000, 0], [None, 64])[0] == 1000


def test_memory_for_less_than_a_block_is_refused_with_what_one_takes():
    engine = EngineConfig(kv_cache_bytes=1 << 16, **SMALL)
    with pytest.raises(ConfigError, match="one block of 16 tokens takes 70000 bytes"):
        cache_blocks(engine, [60_000, 10_000], [None, 64])


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("layer_major", [False, True])
def test_a_stage_with_some_of_the_groups_numbers_lists_as_the_whole_model(separate: bool, layer_major: bool):
    """Layers 2 to 4 of six, of which every third one sees everything; the others have a window."""
    groups = LayerGroups.of([64, 64, None] * 2)
    assert groups == LayerGroups((64, None), (0, 0, 1, 0, 0, 1))
    shape = CacheShape((3, 4), groups, HeadInterval(2, 4), 16, 256, CacheOptions(False, layer_major, separate))
    assert shape.held_groups == (0,)
    assert shape.lists == (2 if separate else 1)
    half = 2 * 16 * 256
    assert shape.block_bytes() == ((4 * half, 0) if separate else (4 * half,))
    (pool,) = plan_pools(shape, (8, 3) if separate else (8,))
    assert (pool.number, pool.num_blocks, pool.size) == (0, 8, 8 * 4 * half)
