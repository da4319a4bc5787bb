"""Names of KV blocks by content: one chain of hashes over a prompt, alike in every process that knows the model.

    root      = xxh3_128(everything that changes KV bytes of equal tokens, and the salt of the cache)
    key(i)    = xxh3_128(key(i - 1) || tokens of block i as little-endian u32),        key(-1) = root

Equal keys mean equal blocks *with equal prefixes*. Keys are 16 bytes; a chain is made for one block size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

KEY_BYTES = 16
_BYTES_PER_TOKEN = 4


def root_key(*, weights_digest: bytes, attention_digest: bytes, kv_dtype: str, adapter: str = "", salt: bytes) -> bytes:
    """The parent of first blocks. `salt` separates caches: requests with different salts never share a key."""
    state = xxhash.xxh3_128()
    for part in (b"isthmus block keys 1", weights_digest, attention_digest, kv_dtype.encode(), adapter.encode(), salt):
        # With their lengths, so that no two lists of parts have one text.
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.digest()


def chain(parent: bytes, tokens: bytes, tokens_per_block: int) -> list[bytes]:
    """Keys of the full blocks of `tokens` (little-endian u32, as `isthmus_core.token_ids`), which follow the block
    `parent`; a rest that fills no block has no key."""
    size = tokens_per_block * _BYTES_PER_TOKEN
    digest = xxhash.xxh3_128_digest
    keys: list[bytes] = []
    for begin in range(0, len(tokens) - size + 1, size):
        parent = digest(parent + tokens[begin : begin + size])
        keys.append(parent)
    return keys


def join_keys(keys: Sequence[bytes]) -> bytes:
    """Keys one after the other, as they travel."""
    return b"".join(keys)


def split_keys(data: bytes) -> tuple[bytes, ...]:
    """The inverse of `join_keys`. Raises ValueError when the length is no multiple of 16."""
    if len(data) % KEY_BYTES:
        raise ValueError(f"{len(data)} bytes are no list of {KEY_BYTES}-byte keys")
    return tuple(data[begin : begin + KEY_BYTES] for begin in range(0, len(data), KEY_BYTES))


@dataclass(frozen=True, slots=True)
class Keying:
    """What names the blocks of an instance; instances with equal values name equal blocks alike."""

    weights_digest: bytes
    attention_digest: bytes
    kv_dtype: str
    tokens_per_block: int

    @property
    def keying_id(self) -> bytes:
        """16 bytes that stand for it."""
        size = self.tokens_per_block.to_bytes(4, "little")
        return xxhash.xxh3_128_digest(b"isthmus keying 1" + self.root(b"") + size)

    def root(self, salt: bytes, adapter: str = "") -> bytes:
        """The parent of first blocks of the cache with that salt, computed with that LoRA adapter."""
        return root_key(
            weights_digest=self.weights_digest,
            attention_digest=self.attention_digest,
            kv_dtype=self.kv_dtype,
            adapter=adapter,
            salt=salt,
        )
