"""The configuration schema: unknown keys name the nearest known one, bad values name the key and the value."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus_core.config import known_keys, load_config, parse_config
from isthmus_core.errors import ConfigError


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"worker": {"rle": "context"}}, "unknown key worker.rle; did you mean worker.role?"),
        ({"engine": {"mock": {"sed": 1}}}, "unknown key engine.mock.sed; did you mean engine.mock.seed?"),
        ({"wrker": {}}, "unknown key wrker; did you mean worker"),
        ({"engine": {"tokens_per_block": 0}}, "engine.tokens_per_block = 0"),
        ({"engine": {"device": "tpu"}}, "engine.device = 'tpu'"),
        ({"worker": {"role": "prefill"}}, "worker.role = 'prefill'"),
        ({"tls": {"ca": "ca.pem"}}, "only ca set; set ca, cert and key"),
        ({"transfer": {"timeout_s": float("nan")}}, "transfer.timeout_s"),
    ],
)
def test_bad_settings_are_named(data: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    assert says in str(caught.value)


def test_all_problems_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"worker": {"rle": 1}, "engine": {"max_running": -1}})
    assert "worker.rle" in str(caught.value)
    assert "engine.max_running = -1" in str(caught.value)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("engine:\n  kind: mock\n  max_running: 3\n")
    config = load_config(file, ["engine.max_running=5", "engine.mock.seed=7", "transfer.backend=nixl"])
    assert (config.engine.kind, config.engine.max_running, config.engine.mock.seed) == ("mock", 5, 7)
    assert config.transfer.backend == "nixl"


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        load_config(file)


def test_a_missing_file_and_a_malformed_override_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        load_config(None, ["engine.kind"])
    with pytest.raises(ConfigError, match="a value, not a section"):
        load_config(None, ["engine.kind=mock", "engine.kind.x=1"])


def test_there_is_no_default_transfer_backend() -> None:
    assert parse_config({}).transfer.backend is None
    assert "transfer.backend" in known_keys()


def test_the_served_name_comes_from_the_path_unless_given() -> None:
    assert parse_config({"model": {"path": "/models/tiny"}}).model.served_name == "tiny"
    assert parse_config({"model": {"path": "/models/tiny", "name": "x"}}).model.served_name == "x"
    with pytest.raises(ConfigError, match=r"model\.path"):
        _ = parse_config({}).model.served_name
