"""The owners of KV blocks: two managers behind one protocol, and where the blocks lie."""

from isthmus_worker.cache.base import CacheManager as CacheManager
from isthmus_worker.cache.block_manager import BlockManager as BlockManager
from isthmus_worker.cache.block_table import BlockTable as BlockTable
