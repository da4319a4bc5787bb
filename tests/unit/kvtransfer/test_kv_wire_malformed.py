"""Everything malformed is a WireError that names a field."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.v1 import kv_pb2, transfer_ipc_pb2, transfer_pb2, transfer_terms_pb2

from kvtransfer import wire
from kvtransfer.errors import WireError
from kvtransfer.messages import (
    Capability,
    Envelope,
    Hello,
    KvRequest,
    Ping,
)
from kvtransfer.ports import (
    CancelWrite,
    LoadPeer,
    RankReady,
    ReceiveOutcome,
    RequestKey,
    TokenRange,
    WriteOrder,
)
from wire_samples import BLOCKS, BODIES, INSTANCE, KEY, NOTICE, OTHER_ID, SOME_ID, TRACE


def _change(change):
    pb = transfer_pb2.PeerMessage()
    pb.CopyFrom(wire.peer_message_to_pb(BODIES[0]))
    change(pb.hello)
    return pb


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda h: setattr(h.instance, "role", 0), "hello.instance.role"),
        (lambda h: setattr(h.instance, "role", 9), "hello.instance.role"),
        (lambda h: setattr(h.instance, "incarnation", b"short"), "incarnation"),
        (lambda h: setattr(h.instance.model, "kv_dtype", ""), "model.kv_dtype"),
        (lambda h: h.ClearField("instance"), "hello.instance"),
        (lambda h: h.ClearField("limits"), "hello.limits"),
        (lambda h: setattr(h.limits, "max_block_ids", 0), "hello.limits.max_block_ids"),
        (lambda h: setattr(h, "min_protocol_version", 2), "min_protocol_version"),
        (lambda h: h.capabilities.append(0), "hello.capabilities"),
        (lambda h: h.instance.ranks.pop(), "ranks"),
        (lambda h: setattr(h.instance.ranks[1], "rank", 0), "rank"),
        (lambda h: h.instance.ranks[0].page_table.groups[0].ClearField("kind"), "groups[0].kind"),
        (lambda h: setattr(_view(h), "mapper_kind", 0), "views[0].mapper_kind"),
        (lambda h: setattr(_view(h), "mapper_kind", 77), "views[0].mapper_kind"),
        (lambda h: setattr(_view(h), "pool", 5), "views[0].pool"),
        (lambda h: _view(h).roles.append("k"), "views[0].roles"),
        (lambda h: setattr(_view(h).entries, "size_le_u32", b"\0\0\0"), "entries.size_le_u32"),
        (lambda h: setattr(_view(h).entries, "size_le_u32", b"\0\0\0\1"), "entries.size"),
        (lambda h: setattr(h.instance.ranks[0].page_table.regions[0], "memory_kind", 99), "regions[0].memory_kind"),
        (lambda h: setattr(h.instance.ranks[0].page_table.regions[0], "size_bytes", 9), "entries"),
        (lambda h: h.instance.ranks[0].page_table.regions.extend([kv_pb2.RegisteredRegion()] * 70_000), "regions"),
    ],
)
def test_malformed_hello_names_the_field(change, field):
    with pytest.raises(WireError) as caught:
        wire.peer_bodies_from_pb(_change(change))
    assert field in str(caught.value)


def _view(hello: transfer_terms_pb2.Hello) -> kv_pb2.PoolView:
    return hello.instance.ranks[0].page_table.groups[0].attention.views[0]


def test_capabilities_of_a_newer_peer_are_dropped():
    (hello,) = wire.peer_bodies_from_pb(_change(lambda h: h.capabilities.append(99)))
    assert isinstance(hello, Hello)
    assert hello.capabilities == frozenset({Capability.RECONCILE})


@pytest.mark.parametrize("data", [b"", b"\xfa\x01\x00", b"\xa2\x06\x00"])
def test_unknown_bodies_are_refused(data):
    with pytest.raises(WireError, match=r"peer_message\.body"):
        wire.peer_bodies_from_pb(transfer_pb2.PeerMessage.FromString(data))
    with pytest.raises(WireError, match=r"rank_command\.body"):
        wire.rank_input_from_bytes(
            transfer_ipc_pb2.RankInput(commands=[transfer_ipc_pb2.RankCommand()]).SerializeToString()
        )


@pytest.mark.parametrize("request_id", [0, (1 << 40) - 1, 1 << 63])
def test_ids_outside_the_global_range_neither_leave_nor_enter(request_id):
    pb = transfer_pb2.PeerMessage()
    pb.cancel.key.request_id = request_id
    with pytest.raises(WireError, match="request_id"):
        wire.peer_bodies_from_pb(pb)
    with pytest.raises(ValueError, match="never travel"):
        wire.key_to_pb(RequestKey(request_id))


def _kv_request(**changes):
    pb = wire.peer_message_to_pb(KvRequest(KEY, TokenRange(0, 4), BLOCKS, TRACE, 1))
    for name, value in changes.items():
        target, _, attribute = name.rpartition("__")
        owner = pb.kv_request
        for step in target.split("__") if target else ():
            owner = getattr(owner, step)
        setattr(owner, attribute, value)
    return pb


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"destinations__le_int32": b"\0" * 6}, "6 bytes"),
        ({"destinations__le_int32": bytes(4 * ((1 << 22) + 1))}, "at most"),
        ({"destinations__count": 1 << 13}, "8192 lists, at most"),
        ({"destinations__count": 3}, "le_uint32"),
        ({"destinations__le_uint32": struct.pack("<8I", 1, 1, 0, 0, 0, 0, 2, 1)}, "twice"),
        ({"tokens__begin": 5}, "runs backwards"),
        ({"trace__span_id": b"1"}, "trace"),
    ],
)
def test_malformed_requests_name_the_field(changes, field):
    with pytest.raises(WireError, match=field):
        wire.peer_bodies_from_pb(_kv_request(**changes))


def test_unsettled_success_is_refused():
    pb = wire.receive_outcome_to_pb(ReceiveOutcome(KEY, True))
    pb.settled = False
    with pytest.raises(WireError, match="settled"):
        wire.receive_outcome_from_pb(pb)


@pytest.mark.parametrize(
    ("field", "code", "at", "value", "problem"),
    [
        ("le_uint32", "I", 3, 0, "outcome"),
        ("le_uint32", "I", 3, 4, "outcome"),
        ("le_uint32", "I", 4, 1, "not_held"),
        ("le_uint32", "I", 6, 2, "extents"),
        ("le_uint32", "I", 7, 9, "number 9 is named"),
        ("le_uint64", "Q", 0, 1, "request_id"),
        ("le_float64", "d", 2, -1.0, "post"),
        ("le_float64", "d", 3, float("nan"), "wire"),
        ("extents", "I", 2, 1 << 30, "run backwards"),
        ("extents", "I", 5, 0, "run backwards"),
    ],
)
def test_malformed_notices_are_refused(field: str, code: str, at: int, value: float, problem: str):
    pb = wire.notices_to_pb([NOTICE])
    data = getattr(pb, field)
    numbers = list(struct.unpack(f"<{len(data) // struct.calcsize(code)}{code}", data))
    numbers[at] = value
    setattr(pb, field, struct.pack(f"<{len(numbers)}{code}", *numbers))
    with pytest.raises(WireError, match=problem):
        wire.notices_from_pb(pb)


@pytest.mark.parametrize("field", ["le_uint64", "le_uint32", "le_float64", "extents"])
def test_columns_of_a_newer_peer_are_left_and_missing_ones_refused(field: str):
    notices = (NOTICE, NOTICE._replace(dst_rank=5, reason="late", extents=()))
    pb = wire.notices_to_pb(notices)
    assert wire.notices_from_pb(pb) == notices
    data = getattr(pb, field)
    rows = 1 if field == "extents" else 2
    setattr(pb, field, data + bytes(rows * (4 if field in ("le_uint32", "extents") else 8)))
    assert wire.notices_from_pb(pb) == notices
    setattr(pb, field, data[:-4])
    with pytest.raises(WireError, match=field):
        wire.notices_from_pb(pb)


def test_notices_that_follow_each_other_are_one_message():
    bodies = (Ping(1), *(NOTICE._replace(dst_rank=rank) for rank in range(64)), Ping(2), NOTICE)
    pb = wire.envelope_to_request(Envelope(SOME_ID, OTHER_ID, bodies))
    assert len(pb.messages) == 4
    assert wire.envelope_from_pb(pb).messages == bodies


CORPUS = [
    (
        wire.envelope_to_request(Envelope(SOME_ID, OTHER_ID, (body,))).SerializeToString(),
        wire.envelope_from_request_bytes,
    )
    for body in [*BODIES, KvRequest(KEY, TokenRange(0, 4), BLOCKS, TRACE, 1)]
] + [
    (
        wire.rank_input_to_bytes(
            [LoadPeer(INSTANCE), WriteOrder(KEY, "g", SOME_ID, TokenRange(0, 9), BLOCKS, BLOCKS), CancelWrite(KEY)]
        ),
        wire.rank_input_from_bytes,
    ),
    (wire.rank_output_to_bytes([RankReady(INSTANCE.ranks[0]), NOTICE]), wire.rank_output_from_bytes),
]


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from(range(len(CORPUS))), st.data())
def test_mutated_bytes_parse_or_raise_wire_errors(index, data):
    raw, read = CORPUS[index]
    raw = bytearray(raw)
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw))))]
    try:
        read(bytes(raw))
    except WireError:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    for read in (wire.envelope_from_request_bytes, wire.rank_input_from_bytes, wire.rank_output_from_bytes):
        try:
            read(noise)
        except WireError:
            continue
