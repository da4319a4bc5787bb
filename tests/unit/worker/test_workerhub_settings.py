"""Settings of a worker: what is refused, what is derived."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_core.config import IsthmusConfig, parse_config
from isthmus_core.errors import ConfigError
from isthmus_worker.settings import child_environment, worker_settings
from kvtransfer.rank_info import InstanceRole


def environment_of(config: IsthmusConfig) -> dict[str, str]:
    return child_environment(config, worker_settings(config))


def config(worker: dict[str, Any] | None = None, **sections: Any) -> IsthmusConfig:
    return parse_config({"worker": worker or {}, "model": {"name": "m"}, **sections})


@pytest.mark.parametrize("role", ["context", "generation"])
def test_a_role_that_hands_off_needs_a_backend_and_says_what_to_write(role: str):
    with pytest.raises(ConfigError) as caught:
        worker_settings(config({"role": role}))
    assert "transfer:\n  backend: nixl" in str(caught.value)
    assert role in str(caught.value)


def test_an_unknown_backend_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"transfer\.backend = niksl.*nixl"):
        worker_settings(config({"role": "context"}, transfer={"backend": "niksl"}))


def test_an_instance_that_does_both_needs_no_backend():
    settings = worker_settings(config())
    assert settings.role is InstanceRole.CONTEXT_AND_GENERATION
    assert settings.transfer is None


def test_transfer_settings_reach_kvtransfer():
    transfer = {"backend": "nixl", "timeout_s": 3, "handoff_hold_s": 4, "drain_s": 0.25, "ping_interval_s": 2}
    settings = worker_settings(config({"role": "generation"}, transfer=transfer))
    assert settings.transfer is not None
    assert (settings.transfer.timeout_s, settings.transfer.handoff_hold_s) == (3, 4)
    assert (settings.transfer.drain_s, settings.transfer.ping_s) == (0.25, 2)


def test_names_and_endpoints():
    settings = worker_settings(config({"listen": "127.0.0.1:0"}))
    assert settings.instance_id(5001) == "context_and_generation-5001"
    assert settings.endpoint(5001) == "127.0.0.1:5001"
    settings = worker_settings(config({"instance_id": "w", "listen": "[::1]:7", "advertise": "node-1:0"}))
    assert settings.instance_id(7) == "w"
    assert settings.endpoint(7) == "node-1:7"
    assert worker_settings(config({"listen": "[::1]:7"})).endpoint(7) == "[::1]:7"


@pytest.mark.parametrize(
    ("worker", "words"),
    [
        ({"listen": "0.0.0.0:5000"}, "worker.advertise"),
        ({"listen": "[::]:5000"}, "worker.advertise"),
        ({"listen": "5000"}, "worker.listen"),
        ({"advertise": "node"}, "worker.advertise"),
        ({"coordinator": "node"}, "worker.coordinator"),
    ],
)
def test_addresses_nobody_can_use_are_refused(worker: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        worker_settings(config(worker))


def test_a_model_without_a_name_is_refused():
    with pytest.raises(ConfigError, match=r"model\.path"):
        worker_settings(parse_config({}))


def test_the_engine_process_gets_its_threads_and_its_transport(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "9")
    assert environment_of(config())["OMP_NUM_THREADS"] == "9"
    environment = environment_of(config(engine={"num_threads": 3}))
    assert environment["OMP_NUM_THREADS"] == environment["MKL_NUM_THREADS"] == "3"
    assert environment["PYTHONUNBUFFERED"] == "1"
    monkeypatch.setenv("UCX_TLS", "sm")
    with pytest.raises(ConfigError, match="UCX_TLS"):
        environment_of(config({"role": "context"}, transfer={"backend": "nixl"}))
    assert environment_of(config(transfer={"backend": "nixl"}))["UCX_TLS"] == "sm"
