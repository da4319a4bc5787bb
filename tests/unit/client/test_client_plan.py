"""Options of a local cluster become one valid configuration per process."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_client.plan import MOCK_BLOCKS, ClusterOptions, Ports, merge, plan_cluster
from isthmus_core.config import parse_config
from isthmus_core.errors import ConfigError

PORTS = Ports(coordinator=50, router_grpc=51, router_http=52, workers=(61, 62, 63))
TWO = Ports(coordinator=50, router_grpc=51, router_http=52, workers=(61, 62))


def _plan(options: ClusterOptions, cores: int = 4):
    specs = plan_cluster(options, PORTS, Path("/state"), cores)
    return {spec.name: (spec, parse_config(spec.settings)) for spec in specs}


def test_a_mock_may_have_the_tokenizer_of_a_model():
    plan = _plan(ClusterOptions(context=1, generation=2, engine="mock", model_path=Path("/models/m")))
    for _, config in plan.values():
        assert (config.engine.kind, config.model.tokenizer) == ("mock", "auto")
        assert (config.model.path, config.model.served_name) == (Path("/models/m"), "m")


def test_every_process_finds_the_others():
    plan = _plan(ClusterOptions(context=1, generation=1, unsplit=1, engine="mock"))
    assert list(plan) == ["coordinator", "context-0", "generation-0", "unsplit-0", "router"]
    roles = {name: config.worker.role for name, (spec, config) in plan.items() if spec.module == "isthmus_worker"}
    assert roles == {"context-0": "context", "generation-0": "generation", "unsplit-0": "context_and_generation"}
    for name, (spec, config) in plan.items():
        assert config.model.served_name == "mock"
        if name == "coordinator":
            assert config.coordinator.listen == spec.address == "127.0.0.1:50"
        elif name == "router":
            assert (config.router.listen, config.router.http_listen) == ("127.0.0.1:51", "127.0.0.1:52")
            assert config.router.coordinator == "127.0.0.1:50"
        else:
            assert config.worker.coordinator == "127.0.0.1:50"
            assert config.worker.listen == spec.address
            assert config.transfer.backend == "nixl"
            assert config.engine.num_blocks == MOCK_BLOCKS


def test_the_users_file_changes_defaults_but_not_what_the_options_decide():
    base = {
        "transfer": {"backend": "loopback"},
        "engine": {"num_blocks": 7, "kind": "torch"},
        "logging": {"level": "DEBUG"},
    }
    _, config = _plan(ClusterOptions(context=1, generation=2, engine="mock", base=base))["generation-1"]
    assert config.transfer.backend == "loopback"
    assert config.engine.num_blocks == 7
    assert config.logging.level == "DEBUG"
    assert config.engine.kind == "mock"


def test_workers_share_the_cores():
    plan = _plan(ClusterOptions(context=1, generation=2, engine="mock"), cores=7)
    assert plan["context-0"][1].engine.num_threads == 2
    plan = _plan(ClusterOptions(context=1, generation=2, engine="mock"), cores=1)
    assert plan["context-0"][1].engine.num_threads == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ClusterOptions(context=1, generation=0, engine="mock"), "a split needs at least one of each"),
        (ClusterOptions(context=0, generation=0, engine="mock"), "nothing to start"),
        (ClusterOptions(context=-1, generation=1, engine="mock"), "--context -1: at least 0"),
        (ClusterOptions(engine="torch"), "needs a model"),
    ],
)
def test_impossible_clusters_are_refused(options: ClusterOptions, words: str):
    with pytest.raises(ConfigError, match=words):
        plan_cluster(options, TWO, Path("/state"), 2)


def test_wrong_settings_in_the_users_file_are_refused_before_anything_starts():
    options = ClusterOptions(engine="mock", context=1, generation=2, base={"router": {"listn": "x"}})
    with pytest.raises(ConfigError, match=r"router\.listn; did you mean router\.listen"):
        plan_cluster(options, TWO, Path("/state"), 2)


def test_merge_keeps_its_arguments():
    base = {"a": {"x": 1, "y": 2}, "b": 1}
    assert merge(base, {"a": {"y": 3}, "b": {"z": 1}}) == {"a": {"x": 1, "y": 3}, "b": {"z": 1}}
    assert base == {"a": {"x": 1, "y": 2}, "b": 1}


def test_settings_of_one_kind_of_worker_reach_only_that_kind():
    own = {"context": ["parallel.tensor_parallel_size=2"], "generation": ["engine.tokens_per_block=32"]}
    options = ClusterOptions(1, 1, 1, engine="mock", own=own)
    specs = {spec.name: spec.settings for spec in plan_cluster(options, PORTS, Path("/state"), 8)}
    assert specs["context-0"]["parallel"] == {"tensor_parallel_size": 2}
    assert specs["generation-0"]["engine"]["tokens_per_block"] == 32
    assert "parallel" not in specs["generation-0"]
    assert "tokens_per_block" not in specs["unsplit-0"]["engine"]
    # 4 ranks share the 8 cores.
    assert specs["unsplit-0"]["engine"]["num_threads"] == 2


def test_what_the_cluster_decides_itself_can_not_be_set_for_a_kind():
    options = ClusterOptions(1, 1, engine="mock", own={"context": ["worker.role=generation"]})
    specs = {spec.name: spec.settings for spec in plan_cluster(options, TWO, Path("/state"), 2)}
    assert specs["context-0"]["worker"]["role"] == "context"


def test_a_setting_of_a_kind_that_is_none_is_refused():
    options = ClusterOptions(1, 1, engine="mock", own={"context": ["parallel.tensor=2"]})
    with pytest.raises(ConfigError, match=r"unknown key parallel\.tensor"):
        plan_cluster(options, TWO, Path("/state"), 2)
