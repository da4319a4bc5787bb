"""The `isthmus` command: messages and exit codes, what it shows."""

from __future__ import annotations

import io
import shlex
import socket
import sys
from pathlib import Path

import pytest
from isthmus.v1 import common_pb2, coordinator_service_pb2
from rich.console import Console
from typer.testing import CliRunner

from isthmus_client import cli, supervisor
from isthmus_client.models import fetch_model
from isthmus_client.show import cluster_json, render_cluster
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
