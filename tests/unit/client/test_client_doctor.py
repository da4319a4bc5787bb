"""`isthmus doctor`: a machine in order, and one thing wrong at a time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_client import cli
from isthmus_client.certificates import Authority
from isthmus_client.doctor import Level, check_all
from isthmus_client.doctor.credentials import credential_problems
from isthmus_client.doctor.facts import Facts, Gpu
from isthmus_client.doctor.machine import parse_gpus, parse_peers
from isthmus_core.config import parse_config
from isthmus_core.roles import Role

GIB = 1 << 30
GOOD = Facts(
    python=(3, 11),
    system="Linux",
    machine="x86_64",
    memory_bytes=64 * GIB,
    free_memory_bytes=60 * GIB,
    shm_bytes=8 * GIB,
    cores=16,
    open_files=65536,
    ptrace_scope=0,
    versions={"grpcio": "1.85.3", "torch": "2.13.0", "safetensors": "0.6", "nixl-cu12": "1.5.1", "torch-cuda": "12.8"},
    rdma_devices=("mlx5_0",),
    gpus=(Gpu(0, "H200", 140 * GIB, peers=(1,)), Gpu(1, "H200", 140 * GIB, peers=(0,))),
    model_bytes=16 * GIB,
)
CONFIG = parse_config(
    {
        "worker": {"role": "context"},
        "transfer": {"backend": "nixl"},
        "engine": {"device": "cuda:1"},
        "model": {"path": "/models/m"},
    }
)


def test_nothing_is_wrong_with_a_good_machine():
    assert {one.level for one in check_all(CONFIG, GOOD)} == {Level.OK}


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"system": "Darwin"}, Level.BROKEN, "Darwin"),
        ({"python": (3, 9)}, Level.BROKEN, "Python 3.9"),
        ({"open_files": 256}, Level.NOTE, "256"),
        ({"versions": {"grpcio": "1"}}, Level.BROKEN, "torch is not installed"),
        ({"versions": {**GOOD.versions, "torch-cuda": "13.0"}}, Level.BROKEN, "CUDA 13"),
        ({"busy_ports": ("127.0.0.1:8000 (in use)",)}, Level.BROKEN, "127.0.0.1:8000"),
        ({"unreachable": {"10.0.0.1:1": "no answer"}}, Level.NOTE, "10.0.0.1:1"),
        ({"model_problem": "model.path = /x: no config.json there"}, Level.BROKEN, "/x"),
        ({"model_bytes": 200 * GIB}, Level.BROKEN, "200"),
        ({"gpus": ()}, Level.BROKEN, "cuda:1"),
        ({"ptrace_scope": 2}, Level.NOTE, "ptrace_scope = 2"),
        ({"shm_bytes": 64 << 10}, Level.NOTE, "/dev/shm"),
        ({"rdma_devices": ()}, Level.NOTE, "RDMA"),
        ({"environ": {"UCX_TLS": "cuda_ipc,sm"}}, Level.BROKEN, "without tcp"),
        ({"environ": {"UCX_MAX_RNDV_RAILS": "4"}}, Level.NOTE, "RAILS"),
        ({"environ": {"UCX_CUDA_IPC_ENABLE_MNNVL": "n"}}, Level.NOTE, "MNNVL"),
        ({"environ": {"UCX_NET_DEVICES": "eth0"}}, Level.NOTE, "eth0"),
        ({"environ": {"UCX_RNDV_SCHEME": "put_zcopy"}}, Level.NOTE, "put_zcopy"),
        ({"environ": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}, Level.BROKEN, "expandable_segments"),
        ({"gpus": (replace(GOOD.gpus[0], peers=()), GOOD.gpus[1])}, Level.NOTE, "GPU 0 can not reach"),
        ({"credential_problems": (("tls.cert = c: expired", True),)}, Level.BROKEN, "expired"),
        ({"credential_problems": (("tls.cert = c: expires", False),)}, Level.NOTE, "expires"),
        ({"vllm_problems": ("vllm 0.1 is too old",)}, Level.BROKEN, "too old"),
    ],
)
def test_each_thing_that_is_wrong_is_found_with_a_remedy(change: dict[str, object], level: Level, words: str):
    found = [one for one in check_all(CONFIG, replace(GOOD, **change)) if one.level is not Level.OK]  # pyright: ignore[reportArgumentType]
    (finding,) = [one for one in found if words in one.text]
    assert finding.level is level
    assert finding.remedy


@pytest.mark.parametrize("tls", ["tcp,cuda_copy", "all", "^ib", ""])
def test_transports_that_are_fine(tls: str):
    assert {one.level for one in check_all(CONFIG, replace(GOOD, environ={"UCX_TLS": tls}))} == {Level.OK}


def test_two_sides_that_can_not_be_a_pair():
    peer = parse_config({"worker": {"role": "context"}, "model": {"path": "/models/other", "dtype": "float16"}})
    texts = " ".join(one.text for one in check_all(CONFIG, GOOD, peer) if one.level is Level.BROKEN)
    for words in (
        "mine m, yours other",
        "mine auto, yours float16",
        "transfer.backend: mine nixl, yours None",
        "worker.role",
    ):
        assert words in texts
    good = CONFIG.model_copy(update={"worker": CONFIG.worker.model_copy(update={"role": "generation"})})
    assert {one.level for one in check_all(CONFIG, GOOD, good)} == {Level.OK}


def test_keys_and_certificates_that_are_no_good_are_found(tmp_path: Path):
    authority = Authority.open(tmp_path, 365)
    authority.issue("good", [Role.WORKER], ["localhost"], 365)
    authority.issue("expired", [Role.WORKER], ["localhost"], -1)
    authority.issue("soon", [Role.WORKER], ["localhost"], 2)
    (tmp_path / "empty.crt").write_text("")

    def problems(name: str, keys: str | None = None) -> list[tuple[str, bool]]:
        tls = {"ca": tmp_path / "ca.crt", "cert": tmp_path / f"{name}.crt", "key": tmp_path / "good.key"}
        router = {} if keys is None else {"clients": {"keys_file": tmp_path / keys}}
        return list(credential_problems(parse_config({"tls": tls, "router": router})))

    assert problems("good") == []
    for name, words, broken in (
        ("expired", "expired on", True),
        ("soon", "expires on", False),
        ("absent", "No such file", True),
        ("empty", "no certificate in it", True),
    ):
        ((text, is_broken),) = problems(name)
        assert words in text
        assert is_broken is broken
    ((text, is_broken),) = problems("good", "keys.yaml")
    assert "keys.yaml: No such file" in text
    assert is_broken


def test_what_nvidia_smi_says_is_understood():
    matrix = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tNS\n GPU1\tOK\tX\tNS\n GPU2\tNS\tNS\tX\n\nLegend: X = Self\n"
    peers = parse_peers(matrix)
    assert peers == {0: (1,), 1: (0,), 2: ()}
    cluster = "7a2f0e9b-0000-4000-8000-000000000001"
    listed = (
        f"0, NVIDIA H200, 143771, {cluster}\n1, NVIDIA H200, 143771, 00000000-0000-0000-0000-000000000000\nnot a row\n"
    )
    first, second = parse_gpus(listed, peers)
    assert (first.name, first.memory_bytes, first.fabric_cluster, first.peers) == (
        "NVIDIA H200",
        143771 << 20,
        cluster,
        (1,),
    )
    assert second.fabric_cluster == ""


def test_the_command_looks_at_this_machine(tmp_path: Path):
    result = CliRunner().invoke(
        cli.app, ["doctor", "--json", "--set", "engine.kind=mock", "--set", "worker.coordinator=127.0.0.1:9"]
    )
    found = {one["check"]: one for one in json.loads(result.output)}
    assert found["system"]["level"] == "ok"
    assert found["network"]["level"] == "note"
    broken = CliRunner().invoke(cli.app, ["doctor", "--json", "--set", f"model.path={tmp_path}"])
    assert broken.exit_code == 4
    assert any("no config.json" in one["text"] for one in json.loads(broken.output))
