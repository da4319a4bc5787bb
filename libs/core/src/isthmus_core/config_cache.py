"""The section `cache` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus_core.config_section import Section


class CacheConfig(Section):
    """How the KV cache is managed and laid out. Instances with different settings hand off to each other."""

    manager: Literal["block_table", "radix"] = Field(
        default="block_table",
        description="block_table: one block list for all layers; radix: a tree of prefixes, a pool for each kind of "
        "layer, and layers with a sliding window give back what no token can see any more",
    )
    layout: Literal["hnd", "nhd"] = Field(
        default="hnd", description="a block in the order head, token (hnd) or token, head (nhd)"
    )
    order: Literal["slot_major", "layer_major"] = Field(
        default="slot_major",
        description="slot_major: all layers of a block lie together; layer_major: all blocks of a layer do",
    )
