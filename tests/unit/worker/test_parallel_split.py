"""How a model is cut over ranks, and which cuts are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_core.config import parse_config
from isthmus_core.errors import ConfigError, StartError
from isthmus_worker.engine_process.load import rank_device
from isthmus_worker.parallel.frames import Loaded
from isthmus_worker.parallel.leader import check_alike, choose_backend
from isthmus_worker.parallel.shard import topology_of
from isthmus_worker.parallel.split import HeadShard, even, head_shard, padded, stage_layers
from isthmus_worker.runner import ModelDescription


def test_whole_kv_groups_go_to_a_rank_and_the_remainder_to_the_low_ones():
    assert head_shard(9, 3, 2, 0) == HeadShard((0, 2), ((0, 3), (3, 6)), 3)
    assert head_shard(9, 3, 2, 1) == HeadShard((2, 3), ((6, 9),), 3)


def test_a_kv_head_is_on_every_rank_whose_query_heads_use_it():
    shards = [head_shard(12, 3, 4, rank) for rank in range(4)]
    assert [one.kv for one in shards] == [(0, 1), (0, 2), (1, 3), (2, 3)]
    assert [one.queries for one in shards] == [((0, 3),), ((3, 4), (4, 6)), ((6, 8), (8, 9)), ((9, 12),)]
    # Rank 1 has one query head of KV head 0 and two of KV head 1: the place that is left is a zero head.
    assert [one.heads for one in shards] == [3, 4, 4, 3]


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 8), parts=st.integers(1, 40))
def test_every_query_head_is_on_one_rank_together_with_its_kv_head(kv_heads: int, group: int, parts: int):
    heads = kv_heads * group
    if parts > heads:
        with pytest.raises(ConfigError, match=f"use at most {heads}"):
            head_shard(heads, kv_heads, parts, 0)
        return
    seen: list[int] = []
    for rank in range(parts):
        shard = head_shard(heads, kv_heads, parts, rank)
        assert len(shard.queries) == shard.kv_heads > 0
        for kv, (low, high) in zip(range(*shard.kv), shard.queries, strict=True):
            assert 0 < high - low <= shard.group
            assert {query // group for query in range(low, high)} == {kv}
            seen += range(low, high)
    assert seen == list(range(heads))


@given(total=st.integers(0, 300), parts=st.integers(1, 40))
def test_rows_are_cut_without_a_gap(total: int, parts: int):
    for cut in (even, padded):
        pieces = [cut(total, parts, index) for index in range(parts)]
        assert [row for begin, end in pieces for row in range(begin, end)] == list(range(total))
    assert max(end - begin for begin, end in pieces) == -(-total // parts)


def test_stages_take_the_layers_that_were_asked_for():
    assert [stage_layers(8, 3, None, stage) for stage in range(3)] == [range(3), range(3, 6), range(6, 8)]
    assert [stage_layers(8, 2, [5, 3], stage) for stage in range(2)] == [range(5), range(5, 8)]


@pytest.mark.parametrize(
    ("parallel", "says"),
    [
        ({"tensor_parallel_size": 3, "data_parallel_size": 2}, "does not divide tensor_parallel_size = 3"),
        ({"pipeline_parallel_size": 2, "layer_split": [8]}, "write one number for each of the 2"),
        ({"tensor_parallel_size": 2, "devices": ["cpu"]}, "write one for each of the 2 ranks"),
        ({"tensor_parallel_size": 0}, "greater than or equal to 1"),
        ({"pipeline_parallel_size": 2, "layer_split": [8, 0]}, "greater than or equal to 1"),
    ],
)
def test_sizes_that_can_not_be_are_refused_by_name(parallel: dict[str, object], says: str):
    with pytest.raises(ConfigError, match=says):
        parse_config({"parallel": parallel})


def test_splits_that_the_model_does_not_allow_are_refused_with_its_number_of_layers():
    with pytest.raises(ConfigError, match=r"pipeline_parallel_size = 9: the model has 8 layers, use at most 8"):
        stage_layers(8, 9, None, 0)
    with pytest.raises(ConfigError, match=r"layer_split = \[5, 4\]: its sum is 9, the model has 8 layers"):
        stage_layers(8, 2, [5, 4], 0)


def test_flat_ranks_count_stages_first():
    parallel = parse_config({"parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}).parallel
    places = [topology_of(parallel, rank) for rank in range(4)]
    assert [(one.pp_rank, one.tp_rank) for one in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one.flat_rank for one in places] == [0, 1, 2, 3]


def test_each_rank_has_a_device():
    def devices(device: str, **parallel: object) -> list[str]:
        sizes = {"tensor_parallel_size": 2, **parallel}
        config = parse_config({"engine": {"device": device}, "parallel": sizes})
        return [rank_device(config, rank) for rank in range(2)]

    assert devices("cpu") == ["cpu", "cpu"]
    assert devices("cuda") == ["cuda:0", "cuda:1"]
    assert devices("cuda", devices=["cuda:3", "cuda:3"]) == ["cuda:3", "cuda:3"]
    with pytest.raises(ConfigError, match=r"parallel\.devices"):
        devices("cuda:1")


def test_the_backend_follows_the_devices():
    assert choose_backend("auto", ["cpu", "cpu"]) == "gloo"
    assert choose_backend("auto", ["cuda:0", "cuda:1"]) == "nccl"
    assert choose_backend("auto", ["cuda:0", "cuda:0"]) == "gloo"
    with pytest.raises(ConfigError, match="write gloo"):
        choose_backend("nccl", ["cuda:0", "cuda:0"])


def test_ranks_that_hold_something_else_are_all_named():
    own = ModelDescription("m", 10, 10, (1,), weights_digest=b"w", attention_digest=b"a", kv_dtype="F32")
    check_alike(own, [Loaded(1, "F32", b"a", {}, (4,), "cpu")])
    with pytest.raises(StartError, match=r"rank 1 has dtype BF16, rank 0 has F32.*rank 2 has attention 62"):
        check_alike(own, [Loaded(1, "BF16", b"a", {}, (4,), "cpu"), Loaded(2, "F32", b"b", {}, (4,), "cpu")])
