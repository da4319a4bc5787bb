"""The `isthmus` command: messages and exit codes, what it shows."""

from __future__ import annotations

import io
import json
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from isthmus.v1 import common_pb2, coordinator_service_pb2
from rich.console import Console
from typer.testing import CliRunner

from isthmus_client import cli, supervisor
from isthmus_client.models import fetch_model
from isthmus_client.show import cluster_json, render_cluster
from isthmus_core.api_keys import ApiKey, KeyRing, hash_key, read_keys
from isthmus_core.errors import ConfigError, StartError
from isthmus_core.process import free_port


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _run(*arguments: str):
    return CliRunner().invoke(cli.app, arguments)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--engine", "vllm9"], 2, "--engine vllm9: unknown engine; known: torch, mock"),
        (["up", "--engine", "mock", "--model", "x"], 2, "the mock engine has no weights"),
        (["up", "--engine", "mock", "--context", "0"], 2, "a split needs at least one of each"),
        (["up", "--engine", "mock", "--config", "absent.yaml"], 2, "absent.yaml: No such file"),
        (["generate", "hi", "--endpoint", f"127.0.0.1:{free_port()}"], 1, "UNAVAILABLE"),
        (["cluster", "--coordinator", f"127.0.0.1:{free_port()}"], 1, "UNAVAILABLE"),
    ],
)
def test_failures_are_one_readable_message(arguments: list[str], code: int, words: str):
    result = _run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.output
    assert "Traceback" not in result.output


def test_a_taken_port_ends_the_command_before_a_run_folder_exists(tmp_path: Path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = str(sock.getsockname()[1])
        result = _run("up", "--engine", "mock", "--coordinator-port", port, "--grpc-port", "0", "--http-port", "0")
    assert result.exit_code == 3
    assert f"--coordinator-port = 127.0.0.1:{port}" in result.output
    assert not (tmp_path / "state").exists()


def test_other_systems_are_sent_to_containers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(supervisor, "sys", type("Sys", (), {"platform": "darwin"}))
    result = _run("up", "--engine", "mock", "--coordinator-port", "0", "--grpc-port", "0", "--http-port", "0")
    assert result.exit_code == 3
    assert "needs Linux" in result.output
    assert "docker compose -f deploy/compose.yaml" in result.output


def test_down_without_a_cluster():
    result = _run("down")
    assert result.exit_code == 0
    assert "no cluster is running" in result.output


def test_version():
    assert _run("version").output.startswith("isthmus 0.")


def test_the_printed_calls_can_be_pasted_even_for_an_odd_model_name():
    lines = cli.endpoint_lines("127.0.0.1:1", "http://127.0.0.1:2", "127.0.0.1:3", 'it\'s "a" model')
    (curl,) = [shlex.split(line) for line in lines if line.startswith("curl")]
    (grpcurl,) = [shlex.split(line) for line in lines if line.startswith("grpcurl")]
    assert '"it\'s \\"a\\" model"' in curl[-1]
    assert grpcurl[-2:] == ["127.0.0.1:1", "isthmus.v1.InferenceService/Generate"]


def _cluster() -> coordinator_service_pb2.GetClusterResponse:
    context = coordinator_service_pb2.InstanceDescriptor(
        instance_id="context-0", role=common_pb2.INSTANCE_ROLE_CONTEXT, model="m", total_blocks=8
    )
    pair = coordinator_service_pb2.ClusterPair(
        context_instance_id="context-0",
        generation_instance_id="generation-0",
        state=coordinator_service_pb2.PAIR_STATE_INCOMPATIBLE,
    )
    pair.incompatibilities.add(field="tokens_per_block", mine="16", yours="32", remedy="use one block size")
    members = [coordinator_service_pb2.ClusterMember(instance=context, draining=True)]
    return coordinator_service_pb2.GetClusterResponse(members=members, pairs=[pair])


def test_the_cluster_is_shown_with_every_reason():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render_cluster(_cluster()))
    text = console.export_text()
    for words in ("context-0 (draining)", "incompatible", "tokens_per_block: 16 against 32; use one block size", "0/8"):
        assert words in text
    assert cluster_json(_cluster())["open_requests"] == 0


def test_an_endpoint_is_one_word_in_a_narrow_terminal():
    cluster = _cluster()
    cluster.members[0].instance.endpoint = "127.0.0.1:54141"
    cluster.members[0].instance.model = "SmolLM2-135M-Instruct"
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_cluster(cluster))
    assert "127.0.0.1:54141" in console.export_text()


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (3, StartError), (1, StartError)])
async def test_a_model_that_is_not_available_keeps_its_kind_of_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, kind: type[Exception]
):
    stand_in = tmp_path / "python"
    stand_in.write_text(f"#!/bin/sh\nexit {code}\n")
    stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stand_in))
    with pytest.raises(kind, match="--model org/name"):
        await fetch_model("org/name")


def test_keys_are_made_listed_and_removed(tmp_path: Path):
    file = tmp_path / "keys.yaml"
    made = _run("keys", "new", str(file), "alice", "--requests-per-s", "5")
    key = made.output.strip()
    assert made.exit_code == 0
    assert key.startswith("isk-")
    assert key not in file.read_text()
    assert KeyRing(read_keys(file)).find(key) == ApiKey(name="alice", sha256=hash_key(key), requests_per_s=5)
    own = CliRunner().invoke(cli.app, ["keys", "hash", str(file), "bob"], input="a-key-of-our-own-that-is-long\n")
    assert own.exit_code == 0
    assert KeyRing(read_keys(file)).find("a-key-of-our-own-that-is-long")
    assert [one["name"] for one in json.loads(_run("keys", "list", str(file), "--json").output)] == ["alice", "bob"]
    assert _run("keys", "remove", str(file), "alice").exit_code == 0
    assert "alice" not in file.read_text()


def test_keys_that_can_not_be_are_refused(tmp_path: Path):
    file = str(tmp_path / "keys.yaml")
    assert _run("keys", "new", file, "alice").exit_code == 0
    for arguments, words in (
        (("new", file, "alice"), "alice has a key"),
        (("new", file, "no spaces"), "no spaces"),
        (("new", file, "bob", "--tokens-per-min", "-1"), "tokens_per_min"),
        (("remove", file, "bob"), "no key of bob"),
        (("remove", file, "alice"), "the last key"),
        (("list", str(tmp_path / "absent")), "No such file"),
    ):
        result = _run("keys", *arguments)
        assert result.exit_code in (1, 2), arguments
        assert words in result.output, arguments
    short = CliRunner().invoke(cli.app, ["keys", "hash", file, "bob"], input="secret\n")
    assert short.exit_code == 2
    assert "at least 24" in short.output


def _commands(group: Any, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*prefix, name))
        else:
            yield (*prefix, name), command


_EVERY = list(_commands(typer.main.get_command(cli.app)))


@pytest.mark.parametrize(("words", "command"), _EVERY, ids=[" ".join(words) for words, _ in _EVERY])
def test_every_command_speaks_to_programs_and_explains_itself(words: tuple[str, ...], command: Any):
    assert "--json" in {option for parameter in command.params for option in parameter.opts}
    shown = _run(*words, "--help")
    assert shown.exit_code == 0
    assert command.help.split()[0] in shown.output


def test_what_was_done_as_json(tmp_path: Path):
    assert json.loads(_run("version", "--json").output)["version"]
    assert json.loads(_run("down", "--json").output) == {"stopped": []}
    assert json.loads(_run("config", "validate", "--json").output) == {"valid": True}
    made = json.loads(_run("certs", str(tmp_path), "--json").output)
    assert made["ca"] == str(tmp_path / "ca.crt")
    assert all(Path(one).is_file() for one in made["certificates"])
