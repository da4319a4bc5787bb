"""What vLLM's kernels for CPUs store in an order of their own is plain in the copy, and comes back as it was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.errors import GeometryError
from kvtransfer.extractor import extract
from kvtransfer.integrations.vllm.page_tables import AttentionLayers
from kvtransfer.integrations.vllm.repack import Packed
from kvtransfer.page_table import HeadInterval

torch = pytest.importorskip("torch")

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 2, 6, 3, 8, 4


def kernel_caches() -> tuple[AttentionLayers, np.ndarray]:
    """Caches in the kernels' order, and what they hold as [layer, K or V, block, head, token, dim]."""
    plain = torch.arange(1, LAYERS * 2 * BLOCKS * HEADS * TOKENS * DIM + 1, dtype=torch.float32)
    plain = plain.reshape(LAYERS, 2, BLOCKS, HEADS, TOKENS, DIM)
    tensors = []
    for layer in range(LAYERS):
        cache = torch.zeros(BLOCKS, HEADS, TOKENS, 2 * DIM)
        flat = cache.view(BLOCKS, HEADS, 2, TOKENS * DIM)
        for block in range(BLOCKS):
            for head in range(HEADS):
                flat[block, head, 0] = plain[layer, 0, block, head].T.reshape(-1)
                flat[block, head, 1] = plain[layer, 1, block, head].reshape(-1)
        tensors.append((layer, cache))
    content = (("key", DIM * 4), ("value", DIM * 4))
    return AttentionLayers(tuple(tensors), content, HeadInterval(0, HEADS), TOKENS), plain.numpy()


def test_the_copy_is_what_its_page_table_says():
    group, plain = kernel_caches()
    packed = Packed([group])
    packed.pack([(4, 1)])
    table = packed.table()
    ((key, value),) = [one.views for one in table.groups]
    assert key.roles == {"key"}
    assert value.pitch is None
    for number in (0, 1):
        regions = extract(np.array([4, 1], np.int32), table, 0, number)
        region = table.regions[0]
        import ctypes

        memory = (ctypes.c_char * region.size_bytes).from_address(region.base_address)
        found = [
            np.frombuffer(memory, np.float32, length // 4, address - region.base_address)
            for address, length in zip(regions.addresses.tolist(), regions.lengths.tolist(), strict=True)
        ]
        want = [plain[layer, number, block].reshape(-1) for layer in range(LAYERS) for block in (4, 1)]
        assert all((a == b).all() for a, b in zip(found, want, strict=True))


def test_blocks_come_back_as_they_were_and_others_are_left_alone():
    group, _ = kernel_caches()
    packed = Packed([group])
    packed.pack([(0, 3)])
    before = [tensor.clone() for _, tensor in group.tensors]
    for _, tensor in group.tensors:
        tensor.fill_(-1)
    packed.unpack([(3,)])
    for (_, tensor), old in zip(group.tensors, before, strict=True):
        assert torch.equal(tensor[3], old[3])
        assert (tensor[[0, 1, 2, 4, 5]] == -1).all()


def test_no_blocks_are_no_work():
    group, _ = kernel_caches()
    packed = Packed([group])
    packed.pack([()])
    packed.unpack([()])


def test_what_can_not_be_packed_is_refused():
    group, _ = kernel_caches()
    for broken in (
        replace(group, content=(("latent", 2 * DIM * 4),)),
        replace(group, content=(("key", 4), ("value", 8))),
        replace(group, kv_heads=None),
        replace(group, block=2 * TOKENS),
    ):
        with pytest.raises(GeometryError, match="layer 0"):
            Packed([broken])
