"""Views with a pitch: K and V of a token side by side, against a storage that keeps them apart, byte for byte."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import pytest

from kv_storage import rank_info
from kvtransfer.errors import GeometryError, WireError
from kvtransfer.packing import pack_source
from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RegisteredRegion,
)
from kvtransfer.peer_plan import build_plan
from kvtransfer.ports import TokenRange
from kvtransfer.wire import page_table_from_pb, page_table_to_pb

UNIT, LAYERS, BLOCKS = 6, 2, 9


@dataclass
class Cache:
    """[block][layer] then K and V packed in every (head, token), or K and V of a layer one after the other."""

    heads: range
    tokens: int
    kind: MapperKind
    packed: bool
    padding: int = 0

    def __post_init__(self) -> None:
        inner = (len(self.heads), self.tokens) if self.kind is MapperKind.HND else (self.tokens, len(self.heads))
        content = 2 * UNIT + self.padding
        shape = (*inner, content) if self.packed else (2, *inner, UNIT)
        self.array = np.zeros((BLOCKS, LAYERS, *shape), np.uint8)

    def at(self, block: int, layer: int, kv: int, head: int, token: int) -> np.ndarray:
        """The bytes of one unit, by plain indexing."""
        place = (head, token) if self.kind is MapperKind.HND else (token, head)
        whole = self.array[block, layer]
        return whole[place][kv * UNIT : (kv + 1) * UNIT] if self.packed else whole[kv][place]

    def table(self) -> PageTable:
        base, slot = self.array.ctypes.data, self.array[0].nbytes
        layer_bytes = self.array[0, 0].nbytes
        size = len(self.heads) * self.tokens * UNIT
        pitch = 2 * UNIT + self.padding if self.packed else None
        views = tuple(
            PoolView(
                frozenset({role}),
                self.kind,
                0,
                BufferEntries(
                    np.arange(LAYERS, dtype=np.uint32),
                    np.array(
                        [layer * layer_bytes + kv * (UNIT if self.packed else size) for layer in range(LAYERS)],
                        np.uint64,
                    ),
                    np.full(LAYERS, size, np.uint32),
                ),
                HeadInterval(self.heads.start, self.heads.stop),
                pitch=pitch,
            )
            for kv, role in enumerate(("key", "value"))
        )
        region = RegisteredRegion(base, self.array.nbytes, MemoryKind.DRAM)
        group = AttentionGroup(tuple(range(LAYERS)), self.tokens, views)
        table = PageTable((region,), (PhysicalPool(base, slot, BLOCKS, layer_stride_bytes=0),), (group,))
        table.validate()
        return table


def fill(cache: Cache, blocks: np.ndarray, prompt: int) -> None:
    """Position-coded bytes of every token of a prompt."""
    for token in range(prompt):
        block, place = int(blocks[token // cache.tokens]), token % cache.tokens
        for layer in range(LAYERS):
            for kv in (0, 1):
                for nth, head in enumerate(cache.heads):
                    code = (token * 7 + layer * 31 + kv * 101 + head * 13) % 250 + 1
                    cache.at(block, layer, kv, nth, place)[:] = code


def move(src: Cache, dst: Cache, prompt: int, begin: int = 0) -> tuple[int, np.ndarray]:
    """Writes a prompt through the plan. Returns the number of runs and the destination blocks."""
    order = np.random.default_rng(prompt).permutation(BLOCKS).astype(np.int32)
    mine, theirs = order[: -(-prompt // src.tokens)], order[::-1][: -(-prompt // dst.tokens) - begin // dst.tokens]
    fill(src, mine, prompt)
    plan = build_plan(rank_info(src.table()), rank_info(dst.table()))
    pairs = plan.instantiate({0: mine}, {0: theirs}, TokenRange(begin, prompt))
    source, target = src.array.reshape(-1), dst.array.reshape(-1)
    starts = pairs.src - src.array.ctypes.data, pairs.dst - dst.array.ctypes.data
    for a, b, length in zip(*(one.tolist() for one in (*starts, pairs.lengths)), strict=True):
        target[b : b + length] = source[a : a + length]
    return len(pairs), theirs


KINDS = (MapperKind.HND, MapperKind.NHD)


@pytest.mark.parametrize("src_kind", KINDS)
@pytest.mark.parametrize("dst_kind", KINDS)
@pytest.mark.parametrize(("src_packed", "dst_packed"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(4, 4), (8, 4), (4, 8), (4, 6)])
@pytest.mark.parametrize("dst_heads", [range(3), range(1, 2)])
def test_every_unit_arrives(src_kind, dst_kind, src_packed, dst_packed, src_tokens, dst_tokens, dst_heads):
    src = Cache(range(3), src_tokens, src_kind, src_packed)
    dst = Cache(dst_heads, dst_tokens, dst_kind, dst_packed)
    prompt = 13
    _, blocks = move(src, dst, prompt)
    want = Cache(dst_heads, dst_tokens, dst_kind, dst_packed)
    fill(want, blocks, prompt)
    for token in range(prompt):
        block, place = int(blocks[token // dst_tokens]), token % dst_tokens
        for layer in range(LAYERS):
            for kv in (0, 1):
                for head in range(len(dst_heads)):
                    assert (dst.at(block, layer, kv, head, place) == want.at(block, layer, kv, head, place)).all()


def test_lanes_of_equal_storages_move_together():
    """K and V side by side on both sides is one run for a slot, as if nobody had named them apart."""
    count, _ = move(Cache(range(3), 4, MapperKind.HND, True), Cache(range(3), 4, MapperKind.HND, True), 4)
    assert count == 1
    count, _ = move(Cache(range(3), 4, MapperKind.HND, True), Cache(range(1, 2), 4, MapperKind.HND, True), 4)
    assert count == LAYERS


def test_joined_lanes_keep_their_layer():
    caches = Cache(range(3), 4, MapperKind.HND, True), Cache(range(3), 4, MapperKind.HND, True)
    plan = build_plan(*(rank_info(one.table()) for one in caches))
    lists = {0: np.arange(2, dtype=np.int32)}
    packed = pack_source(plan, lists, lists, TokenRange(0, 8))
    bits = packed.nbytes * 8 // LAYERS
    assert packed.layers().tolist() == [[0, bits, 0], [bits, 2 * bits, 1]]


def test_bytes_between_the_units_are_left_alone():
    src = Cache(range(2), 4, MapperKind.HND, True, padding=3)
    dst = Cache(range(2), 4, MapperKind.HND, True, padding=3)
    src.array[..., 2 * UNIT :] = 255
    move(src, dst, 8)
    assert not dst.array[..., 2 * UNIT :].any()
    assert dst.array.any()


def test_views_that_share_bytes_are_refused():
    table = Cache(range(2), 4, MapperKind.HND, True).table()
    (group,) = table.groups
    key, value = group.views
    shifted = dataclasses.replace(
        value, entries=dataclasses.replace(value.entries, offset=value.entries.offset - np.uint64(1))
    )
    broken = dataclasses.replace(table, groups=(dataclasses.replace(group, views=(key, shifted)),))
    with pytest.raises(GeometryError, match="share bytes"):
        broken.validate()


def test_units_larger_than_their_pitch_are_refused():
    table = Cache(range(2), 4, MapperKind.HND, True).table()
    (group,) = table.groups
    views = tuple(dataclasses.replace(view, pitch=UNIT - 1) for view in group.views)
    with pytest.raises(GeometryError, match="overlap"):
        dataclasses.replace(table, groups=(dataclasses.replace(group, views=views),)).validate()


def test_who_does_not_know_the_pitch_refuses_the_table(monkeypatch):
    table = Cache(range(2), 4, MapperKind.HND, True).table()
    pb = page_table_to_pb(table)
    assert page_table_from_pb(pb) == table
    monkeypatch.setattr("kvtransfer.wire.page_tables.KNOWN_FEATURES", frozenset[str]())
    with pytest.raises(WireError, match="unit_pitch"):
        page_table_from_pb(pb)
    assert not page_table_to_pb(Cache(range(2), 4, MapperKind.HND, False).table()).required_features
