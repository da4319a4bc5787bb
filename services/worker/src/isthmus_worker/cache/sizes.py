"""How many blocks each block list of a cache gets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_core.config import EngineConfig


def cache_blocks(engine: EngineConfig, block_bytes: Sequence[int], windows: Sequence[int | None]) -> tuple[int, ...]:
    """Blocks of each list: engine.num_blocks, else what fits into engine.kv_cache_bytes.

    `block_bytes` and `windows`: of each list; 0 bytes where this rank has no layer of it. Beside layers that see
    everything, layers with a window get what engine.max_running sequences can see at once, when that is less. Raises
    ConfigError when not one block fits.
    """
    caps = [_enough(engine, window) if None in windows else None for window in windows]
    if engine.num_blocks is not None:
        return _capped(engine.num_blocks, caps)
    low, high = 0, engine.kv_cache_bytes // min(filter(None, block_bytes))
    while low < high:
        middle = (low + high + 1) // 2
        needed = sum(n * size for n, size in zip(_capped(middle, caps), block_bytes, strict=True))
        low, high = (middle, high) if needed <= engine.kv_cache_bytes else (low, middle - 1)
    if low < 1:
        raise ConfigError(
            f"engine.kv_cache_bytes = {engine.kv_cache_bytes}: one block of {engine.tokens_per_block} tokens takes "
            f"{sum(block_bytes)} bytes"
        )
    return _capped(low, caps)


def _enough(engine: EngineConfig, window: int | None) -> int | None:
    """What max_running sequences hold of layers with this window: each what one token sees, and where it begins and
    ends amid a block; and a step's tokens."""
    if window is None:
        return None
    size = engine.tokens_per_block
    return engine.max_running * (-(-window // size) + 2) + -(-engine.max_batch_tokens // size)


def _capped(count: int, caps: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(count if cap is None else min(count, cap) for cap in caps)
