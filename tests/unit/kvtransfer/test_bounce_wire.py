"""Messages about chunks survive the wire, and malformed ones are refused with the field."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from isthmus.v1 import transfer_bounce_pb2

from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer import wire
from kvtransfer.bounce_ports import (
    BounceChunk,
    ChunkName,
    ChunkReady,
    Grant,
    MeetSource,
    PeerWord,
    PrepareScatter,
    Scattered,
    ScatterOrder,
)
from kvtransfer.errors import GeometryError, WireError
from kvtransfer.messages import Envelope
from kvtransfer.pools import MemoryKind
from kvtransfer.ports import RankBlocks, RequestKey, TokenRange
from kvtransfer.rank_info import InstanceRole
from kvtransfer.wire import bounce

NAME = ChunkName(RequestKey((1 << 40) + 5, 2), 7, 1, 3, 99)
HOST_CHUNK = BounceChunk(NAME, TokenRange(8, 24), 4096, 8192, 1 << 20, (0, 2), host=True)
CHUNK = BounceChunk(NAME, TokenRange(8, 24), 4096, 8192, 1 << 20, (0, 2))


@pytest.mark.parametrize(
    "body",
    [
        ChunkReady(NAME, 1 << 30),
        ChunkReady(NAME, 1, host=True),
        ChunkReady(NAME, 1, window=TokenRange(8, 24), layer_groups=(0, 2)),
        Grant(NAME, 1 << 33, 0),
        CHUNK,
        HOST_CHUNK,
    ],
)
def test_what_hubs_say(body):
    envelope = Envelope(b"a" * 16, b"b" * 16, (body,))
    assert wire.envelope_from_request_bytes(wire.envelope_to_request(envelope).SerializeToString()) == envelope


def test_what_a_hub_tells_its_ranks():
    table = Storage(Shape(), "slot_major", 4).page_table()
    meet = MeetSource(instance(rank_info(table), role=InstanceRole.CONTEXT, name="c"), instance(rank_info(table)))
    order = ScatterOrder("c", b"c" * 16, CHUNK, TokenRange(0, 24), (RankBlocks(3, 0, np.array([4, -1], np.int32), 8),))
    prepare = PrepareScatter("c", b"c" * 16, NAME, CHUNK.window, CHUNK.layer_groups, order.tokens, order.destinations)
    commands = wire.rank_input_to_bytes([Grant(NAME, 64, 128), meet, prepare, order])
    grant, met, prepared, scatter = wire.rank_input_from_bytes(commands)
    assert isinstance(prepared, PrepareScatter)
    assert (prepared.name, prepared.window, prepared.layer_groups) == (NAME, CHUNK.window, CHUNK.layer_groups)
    assert prepared.destinations[0].blocks.tolist() == [4, -1]
    assert grant == Grant(NAME, 64, 128)
    assert isinstance(met, MeetSource)
    assert (met.peer.instance_id, met.own.instance_id) == ("c", "generation-0")
    assert isinstance(scatter, ScatterOrder)
    assert (scatter.chunk, scatter.tokens, scatter.destinations[0].begin) == (CHUNK, TokenRange(0, 24), 8)
    assert scatter.destinations[0].blocks.tolist() == [4, -1]


@pytest.mark.parametrize(
    "event",
    [
        PeerWord("g", b"g" * 16, ChunkReady(NAME, 5)),
        PeerWord("g", b"g" * 16, CHUNK),
        Scattered(NAME, "does not fit"),
        Scattered(NAME),
    ],
)
def test_what_a_rank_says(event):
    assert wire.rank_output_from_bytes(wire.rank_output_to_bytes([event])) == (event,)


def test_an_arena_travels_with_its_rank():
    storage, arena = Storage(Shape(), "slot_major", 4), Storage(Shape(), "slot_major", 1).page_table().regions[0]
    info = rank_info(storage.page_table())
    with_arena = type(info)(info.rank, info.topology, info.page_table, info.agent, arena=arena)
    assert wire.rank_info_from_pb(wire.rank_info_to_pb(with_arena)).arena == arena
    assert arena in with_arena.regions


def test_memory_on_the_host_travels_with_a_rank_on_a_device():
    device, on_host = Storage(Shape(), "slot_major", 4, kind=MemoryKind.VRAM), Storage(Shape(), "slot_major", 1)
    (region,) = on_host.page_table().regions
    info = replace(rank_info(device.page_table()), host_scratch=region, host_arena=region)
    assert wire.rank_info_from_pb(wire.rank_info_to_pb(info)) == info
    assert info.arena_for(MemoryKind.DRAM) == info.scratch_for(MemoryKind.DRAM) == region
    assert info.arena_for(MemoryKind.VRAM) is None
    with pytest.raises(GeometryError, match="must be DRAM"):
        replace(info, host_arena=replace(region, memory_kind=MemoryKind.VRAM))


def changed(**fields: int) -> transfer_bounce_pb2.BounceChunk:
    pb = bounce.chunk_to_pb(CHUNK)
    for name, value in fields.items():
        setattr(pb, name, value)
    return pb


@pytest.mark.parametrize(
    ("read", "pb", "field"),
    [
        (bounce.chunk_from_pb, changed(packed_end=4096), "packed_end"),
        (bounce.chunk_from_pb, changed(packed_end=1 << 63), "packed_end"),
        (bounce.chunk_from_pb, changed(arena_offset=1 << 63), "arena_offset"),
        (bounce.chunk_from_pb, transfer_bounce_pb2.BounceChunk(packed_end=1), "window"),
        (bounce.chunk_ready_from_pb, transfer_bounce_pb2.ChunkReady(bytes=1), "name"),
        (bounce.chunk_ready_from_pb, transfer_bounce_pb2.ChunkReady(), "bytes"),
        (bounce.grant_from_pb, transfer_bounce_pb2.Grant(bytes=1 << 63), "bytes"),
    ],
)
def test_malformed_messages_name_the_field(read, pb, field):
    with pytest.raises(WireError, match=field):
        read(pb)
