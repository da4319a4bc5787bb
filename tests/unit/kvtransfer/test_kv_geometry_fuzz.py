"""Descriptions of a rank as a broken or hostile peer might send them: a value, or a WireError, in bounded memory."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.v1 import kv_pb2

from kv_oracle.draw import seeded_case
from kv_oracle.named import attention, deploy, hybrid, mamba
from kv_oracle.tables import build_instance
from kvtransfer import wire
from kvtransfer.errors import KVTransferError, WireError
from kvtransfer.rank_info import InstanceRole, RankInfo
from kvtransfer.wire._read import parse

MEMORY_LIMIT = 96 << 20  # bytes that reading one message may take at its peak


def ranks(seed: int) -> tuple[RankInfo, ...]:
    case = seeded_case(seed)
    return build_instance(case.model, case.src, case.slots(case.src), InstanceRole.CONTEXT, "context-0").info.ranks


def read(data: bytes) -> RankInfo:
    return wire.rank_info_from_pb(parse(kv_pb2.RankInfo, data, "rank_info"))


def sent(info: RankInfo) -> bytes:
    return wire.rank_info_to_pb(info).SerializeToString()


def small(model=None, **options) -> kv_pb2.RankInfo:
    model = model or attention(layers=2)
    made = build_instance(model, deploy(model, **options), (3,) * len(model.groups), InstanceRole.CONTEXT, "context-0")
    return wire.rank_info_to_pb(made.info.ranks[0])


CORPUS = [sent(ranks(seed)[-1]) for seed in range(24)] + [small(hybrid(), tp=2).SerializeToString()]


@pytest.mark.parametrize("seed", range(40))
def test_every_drawn_rank_survives_the_wire(seed):
    for info in ranks(seed)[:4]:
        assert read(sent(info)) == info


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(st.sampled_from(range(len(CORPUS))), st.integers(0, 1 << 32))
def test_mutated_messages_parse_or_raise_wire_errors(index, seed):
    rng, raw = random.Random(seed), bytearray(CORPUS[index])
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(raw))
        change = rng.randrange(5)
        if change == 0:
            raw[at] = rng.randrange(256)
        elif change == 1:
            raw[at] ^= 1 << rng.randrange(8)
        elif change == 2:
            del raw[at : at + rng.randint(1, 8)]
        elif change == 3:
            raw[at:at] = rng.choice((b"\xff" * 9 + b"\x01", b"\x00", b"\x80" * 5, bytes(raw[: rng.randint(1, 40)])))
        else:
            raw[at:] = b""
        if not raw:
            break
    try:
        read(bytes(raw))
    except WireError:
        return


@pytest.mark.parametrize("index", range(0, len(CORPUS), 4))
def test_every_truncation_is_an_answer(index):
    raw = CORPUS[index]
    step = max(1, len(raw) // 400)
    for end in range(0, len(raw), step):
        try:
            read(raw[:end])
        except WireError:
            continue


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(st.binary(max_size=300))
def test_noise_is_refused(noise):
    with pytest.raises(WireError):
        read(noise)


def first_view(pb: kv_pb2.RankInfo) -> kv_pb2.PoolView:
    return pb.page_table.groups[0].attention.views[0]


def first_pool(pb: kv_pb2.RankInfo) -> kv_pb2.PhysicalPool:
    return pb.page_table.pools[0]


def many_entries(pb: kv_pb2.RankInfo, count: int) -> None:
    entries = first_view(pb).entries
    entries.layer_le_u32 = bytes(4 * count)
    entries.offset_le_u64 = np.arange(count, dtype="<u8").tobytes()
    entries.size_le_u32 = struct.pack("<I", 4) * count


def spread_over_regions(pb: kv_pb2.RankInfo) -> None:
    """Very many slots, none of which an early check can clear: they end outside the last of many regions."""
    first_pool(pb).num_slots = (1 << 31) - 1
    base = pb.page_table.regions[0].base_address
    del pb.page_table.regions[:]
    for i in range(1 << 10):
        pb.page_table.regions.add(base_address=base + (i << 20), size_bytes=1 << 20, memory_kind=1)


def cut_into_slots(pb: kv_pb2.RankInfo) -> None:
    spread_over_regions(pb)
    first_pool(pb).num_slots = 1 << 22


def many_groups_over_regions(pb: kv_pb2.RankInfo) -> None:
    """Work that is small for one view and would take hours for all of them."""
    cut_into_slots(pb)
    first = pb.page_table.groups[0]
    del pb.page_table.groups[1:]
    for g in range(1, 1 << 9):
        group = pb.page_table.groups.add()
        group.CopyFrom(first)
        del group.attention.global_layer_ids[:]
        group.attention.global_layer_ids.extend((10 * g, 10 * g + 1))


def many_interleaved_entries(pb: kv_pb2.RankInfo) -> None:
    """Every buffer has to be compared with every other, in many groups."""
    first_pool(pb).slot_bytes = first_pool(pb).slot_stride_bytes = 1 << 20
    pb.page_table.regions[0].size_bytes = 1 << 40
    first = pb.page_table.groups[0]
    count = 1 << 14
    entries = first_view(pb).entries
    entries.layer_le_u32 = bytes(4 * count)
    entries.offset_le_u64 = (np.arange(count, dtype="<u8") * 64).tobytes()
    entries.size_le_u32 = struct.pack("<I", 16) * count
    del pb.page_table.groups[1:]
    for g in range(1, 1 << 5):
        group = pb.page_table.groups.add()
        group.CopyFrom(first)
        group.attention.global_layer_ids[0] = 100 + g


def deep(pb: kv_pb2.RankInfo) -> None:
    for _ in range(1 << 12):
        pb.page_table.groups.add().CopyFrom(pb.page_table.groups[0])


ADVERSARIAL = {
    "pools": lambda pb: pb.page_table.pools.extend([pb.page_table.pools[0]] * 200_000),
    "regions": lambda pb: pb.page_table.regions.extend([pb.page_table.regions[0]] * 200_000),
    "regions that overlap": lambda pb: pb.page_table.regions.extend([pb.page_table.regions[0]] * 30_000),
    "groups": deep,
    "views": lambda pb: pb.page_table.groups[0].attention.views.extend([first_view(pb)] * 5000),
    "layers": lambda pb: pb.page_table.groups[0].attention.global_layer_ids.extend(range(2, 1 << 20)),
    "a layer of 2^32 - 1": lambda pb: pb.page_table.groups[0].attention.global_layer_ids.append((1 << 32) - 1),
    "roles": lambda pb: first_view(pb).roles.extend(str(i) for i in range(100_000)),
    "a role of a megabyte": lambda pb: first_view(pb).roles.append("r" * (1 << 20)),
    "entries": lambda pb: many_entries(pb, 1 << 20),
    "entries that overlap": lambda pb: many_entries(pb, 1 << 14),
    "2^31 slots over many regions": spread_over_regions,
    "2^22 slots over many regions": cut_into_slots,
    "512 views over many regions": many_groups_over_regions,
    "half a million buffers that interleave": many_interleaved_entries,
    "2^64 - 1 slots": lambda pb: setattr(first_pool(pb), "num_slots", (1 << 64) - 1),
    "no slots": lambda pb: setattr(first_pool(pb), "num_slots", 0),
    "a slot of 2^64 - 1 bytes": lambda pb: setattr(first_pool(pb), "slot_bytes", (1 << 64) - 1),
    "a slot stride of 2^64 - 1": lambda pb: setattr(first_pool(pb), "slot_stride_bytes", (1 << 64) - 1),
    "a layer stride of 2^63": lambda pb: setattr(first_pool(pb), "layer_stride_bytes", 1 << 63),
    "an address of 2^64 - 1": lambda pb: setattr(first_pool(pb), "base_address", (1 << 64) - 1),
    "a region that wraps": lambda pb: setattr(pb.page_table.regions[0], "size_bytes", (1 << 64) - 1),
    "an offset of 2^64 - 1": lambda pb: setattr(
        first_view(pb).entries, "offset_le_u64", b"\xff" * len(first_view(pb).entries.offset_le_u64)
    ),
    "sizes of 2^32 - 1": lambda pb: setattr(
        first_view(pb).entries, "size_le_u32", b"\xff" * len(first_view(pb).entries.size_le_u32)
    ),
    "heads of 2^32 - 1": lambda pb: setattr(first_view(pb).kv_heads, "end", (1 << 32) - 1),
    "blocks of 2^32 - 1 tokens": lambda pb: setattr(
        pb.page_table.groups[0].attention, "tokens_per_block", (1 << 32) - 1
    ),
    "a world of 2^32 - 1": lambda pb: setattr(pb.topology, "tp_size", (1 << 32) - 1),
    "metadata of 32 MiB": lambda pb: setattr(pb.agent, "metadata", bytes(32 << 20)),
}


def state(pb: kv_pb2.RankInfo) -> kv_pb2.PoolView:
    return pb.page_table.groups[0].recurrent.views[0]


HOSTILE_STATES = {
    "rows": lambda pb: setattr(state(pb), "rows", (1 << 32) - 1),
    "units": lambda pb: setattr(state(pb).sections[0], "end", (1 << 32) - 1),
    "units that run backwards": lambda pb: setattr(state(pb).sections[0], "begin", 1 << 20),
    "unit bytes": lambda pb: setattr(state(pb).sections[0], "unit_bytes", (1 << 32) - 1),
    "no unit bytes": lambda pb: setattr(state(pb).sections[0], "unit_bytes", 0),
    "a section twice": lambda pb: state(pb).sections.append(state(pb).sections[0]),
    "sections": lambda pb: state(pb).sections.extend(
        kv_pb2.Section(label=str(i), begin=0, end=0, unit_bytes=1) for i in range(100_000)
    ),
    "no sections": lambda pb: state(pb).ClearField("sections"),
    "features": lambda pb: pb.page_table.required_features.extend(["f" * 100] * 100_000),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_hostile_states_are_refused_in_bounded_memory(name):
    refuse(small(mamba()), HOSTILE_STATES[name])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_hostile_sizes_are_refused_in_bounded_memory(name):
    refuse(small(layout="hnd"), ADVERSARIAL[name])


def refuse(pb: kv_pb2.RankInfo, spoil: Callable[[kv_pb2.RankInfo], object]) -> None:
    """`pb` is read; after `spoil` it is refused, naming a field, without much memory."""
    wire.rank_info_from_pb(pb)
    spoil(pb)
    tracemalloc.start()
    try:
        with pytest.raises(WireError) as caught:
            wire.rank_info_from_pb(pb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT, f"{peak >> 20} MiB to refuse it"
    assert caught.value.field.startswith("rank_info")
    assert len(str(caught.value)) < 4096, "the refusal itself is too long to be sent or logged"


def test_errors_of_geometry_have_one_base():
    assert issubclass(WireError, KVTransferError)
