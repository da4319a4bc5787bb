"""Names of KV blocks: what makes them equal, and nothing else does."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from isthmus_core import token_ids
from isthmus_core.block_keys import KEY_BYTES, chain, join_keys, root_key, split_keys

MODEL = {"weights_digest": b"w" * 16, "attention_digest": b"a" * 16, "kv_dtype": "BF16", "adapter": "", "salt": b""}
TOKENS = st.lists(st.integers(0, (1 << 32) - 1), max_size=40)


def slow_chain(parent: bytes, tokens: list[int], size: int) -> list[bytes]:
    """The definition, word by word."""
    keys: list[bytes] = []
    for block in range(len(tokens) // size):
        text = b"".join(token.to_bytes(4, "little") for token in tokens[block * size : (block + 1) * size])
        parent = xxhash.xxh3_128(parent + text).digest()
        keys.append(parent)
    return keys


@given(tokens=TOKENS, size=st.integers(1, 9), parent=st.binary(min_size=16, max_size=16))
def test_a_chain_is_its_definition(tokens: list[int], size: int, parent: bytes):
    assert chain(parent, token_ids.pack(tokens), size) == slow_chain(parent, tokens, size)


@given(tokens=TOKENS, size=st.integers(1, 9), cut=st.integers(0, 40))
def test_a_chain_can_be_continued(tokens: list[int], size: int, cut: int):
    root, whole = root_key(**MODEL), chain(root_key(**MODEL), token_ids.pack(tokens), size)
    begin = chain(root, token_ids.pack(tokens[:cut]), size)
    rest = tokens[len(begin) * size :]
    assert begin + chain(begin[-1] if begin else root, token_ids.pack(rest), size) == whole


def test_equal_blocks_behind_other_blocks_have_other_keys():
    root = root_key(**MODEL)
    one, two = chain(root, token_ids.pack([1, 2, 9, 9]), 2), chain(root, token_ids.pack([3, 4, 9, 9]), 2)
    assert not set(one) & set(two)


@pytest.mark.parametrize("field", list(MODEL))
def test_everything_that_changes_the_bytes_changes_the_keys(field: str):
    other = {**MODEL, field: "x" if isinstance(MODEL[field], str) else b"x"}
    assert root_key(**other) != root_key(**MODEL)


def test_parts_of_a_root_can_not_be_shifted_into_each_other():
    assert root_key(**{**MODEL, "adapter": "ab", "salt": b""}) != root_key(**{**MODEL, "adapter": "a", "salt": b"b"})


def test_golden_keys():
    """Processes of two builds compare keys: this may not change without a new first part of the root."""
    root = root_key(**MODEL)
    assert root.hex() == "b5f67f13025c7320b7ae8fc4eda74bc3"
    assert [key.hex() for key in chain(root, token_ids.pack(range(8)), 4)] == [
        "ebfffbf652e8c80c32f9302dade9ef62",
        "edc3137b7729e7386cf8689c11ccc57f",
    ]


def test_keys_travel_one_after_the_other():
    keys = (b"1" * KEY_BYTES, b"2" * KEY_BYTES)
    assert split_keys(join_keys(keys)) == keys
    assert split_keys(b"") == ()
    with pytest.raises(ValueError, match="17 bytes"):
        split_keys(b"x" * 17)
