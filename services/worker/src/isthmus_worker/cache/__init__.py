"""The owner of KV blocks."""

from isthmus_worker.cache.block_manager import BlockManager as BlockManager
