"""Messages of a later build: what changes the meaning of bytes is refused, what may be ignored is passed on."""

from __future__ import annotations

import pytest
from isthmus.v1 import kv_pb2

from golden_geometry import GOLDEN
from kv_oracle.named import attention, deploy, mamba
from kv_oracle.tables import build_instance
from kvtransfer import wire
from kvtransfer.errors import WireError
from kvtransfer.rank_info import InstanceRole, RankInfo
from kvtransfer.wire._read import parse


def read(data: bytes) -> RankInfo:
    return wire.rank_info_from_pb(parse(kv_pb2.RankInfo, data, "rank_info"))


def test_the_golden_message_of_today_is_read_and_written_as_it_was():
    model = mamba(layers=1, heads=2, groups=1)
    info = build_instance(model, deploy(model), (2,), InstanceRole.CONTEXT, "context-0").info.ranks[0]
    assert read(GOLDEN["today"]) == info
    assert kv_pb2.RankInfo.FromString(GOLDEN["today"]) == wire.rank_info_to_pb(info)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("a section of a new kind, required feature", "page_table.required_features", "strided_sections"),
        ("a mapper kind of the future", "groups[0].views[0].mapper_kind", "5"),
        ("a layer group of a new kind", "groups[0].kind", "does not know"),
        ("memory of a new kind", "regions[0].memory_kind", "99"),
        ("token sharding of a new kind", "groups[0].token_sharding.kind", "4"),
    ],
)
def test_what_changes_the_meaning_of_bytes_is_refused(name, field, value):
    with pytest.raises(WireError) as caught:
        read(GOLDEN[name])
    assert field in caught.value.field
    assert value in str(caught.value)


def test_fields_that_may_be_ignored_survive_being_passed_on():
    data = GOLDEN["fields that may be ignored"]
    passed_on = wire.rank_info_to_pb(read(data))
    assert passed_on == kv_pb2.RankInfo.FromString(data)
    assert b"later" in passed_on.SerializeToString()
    assert b"also later" in passed_on.page_table.SerializeToString()


@pytest.mark.parametrize("enum", ["mapper_kind", "memory_kind", "token_sharding.kind"])
def test_the_unspecified_value_is_refused_too(enum):
    model = attention(layers=1, heads=1)
    side = deploy(model, cp=2, sharding=("zigzag", 1))
    pb = wire.rank_info_to_pb(build_instance(model, side, (2,), InstanceRole.CONTEXT, "context-0").info.ranks[0])
    group = pb.page_table.groups[0].attention
    owner = {
        "mapper_kind": group.views[0],
        "memory_kind": pb.page_table.regions[0],
        "token_sharding.kind": group.token_sharding,
    }
    setattr(owner[enum], enum.split(".")[-1], 0)
    with pytest.raises(WireError, match=enum):
        wire.rank_info_from_pb(pb)
