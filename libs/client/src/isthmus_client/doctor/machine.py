"""Looking at this machine. Nothing is started or changed; what can not be found out is left empty."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from isthmus_client.doctor.checks import check_all
from isthmus_client.doctor.credentials import credential_problems
from isthmus_client.doctor.facts import Facts, Gpu
from isthmus_client.doctor.findings import Finding
from isthmus_core.config import IsthmusConfig, load_config
from isthmus_core.process import split_address

_PACKAGES = ("grpcio", "protobuf", "torch", "safetensors", "nixl-cu12", "nixl-cu13", "transformers", "vllm")
_CONNECT_S = 2.0
_QUERY_S = 10.0


async def examine(file: Path | None, overrides: tuple[str, ...], peer: Path | None) -> list[Finding]:
    """Every finding about this machine and a configuration. Raises ConfigError when that is not one."""
    config = load_config(file, overrides)
    other = None if peer is None else load_config(peer)
    return check_all(config, await collect(config), other)


async def collect(config: IsthmusConfig) -> Facts:
    """What there is."""
    memory = psutil.virtual_memory()
    model_bytes, problem = _model(config)
    unreachable = await _unreachable([config.worker.coordinator] if config.worker.coordinator else [])
    return Facts(
        python=sys.version_info[:2],
        system=platform.system(),
        machine=platform.machine(),
        memory_bytes=memory.total,
        free_memory_bytes=memory.available,
        shm_bytes=_shm_bytes(),
        cores=os.cpu_count() or 1,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ptrace_scope=_ptrace_scope(),
        versions=await _versions(),
        environ={key: value for key, value in os.environ.items() if key.startswith(("UCX_", "PYTORCH_", "NIXL_"))},
        busy_ports=tuple(_busy([config.router.listen, config.router.http_listen, config.worker.listen])),
        unreachable=unreachable,
        rdma_devices=tuple(sorted(path.name for path in _listed(Path("/sys/class/infiniband")))),
        gpus=await _gpus(),
        model_bytes=model_bytes,
        model_problem=problem,
        vllm_problems=await _vllm_problems(config),
        credential_problems=tuple(credential_problems(config)),
    )


def _listed(folder: Path) -> Iterable[Path]:
    return folder.iterdir() if folder.is_dir() else ()


def _shm_bytes() -> int:
    try:
        return shutil.disk_usage("/dev/shm").total
    except OSError:
        return 0


def _ptrace_scope() -> int:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text())
    except (OSError, ValueError):
        return 0  # no Yama: nothing is restricted


async def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if "torch" in found:
        # Its import takes seconds and hundreds of megabytes: in a process of its own.
        cuda = await _output(sys.executable, "-c", "import torch; print(torch.version.cuda or '')", limit_s=60)
        if cuda.strip():
            found["torch-cuda"] = cuda.strip()
    return found


def _busy(addresses: Iterable[str]) -> Iterable[str]:
    for address in addresses:
        host, port = split_address(address, "listen")
        if port == 0:
            continue
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((host, port))
            except OSError as error:
                yield f"{address} ({error.strerror})"


async def _unreachable(addresses: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for address in addresses:
        host, port = split_address(address, "coordinator")
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except TimeoutError:
            found[address] = "no answer"
        except OSError as error:
            found[address] = os.strerror(error.errno) if error.errno else str(error)
    return found


def _model(config: IsthmusConfig) -> tuple[int | None, str]:
    path = config.model.path
    if path is None:
        return None, "" if config.engine.kind == "mock" else "model.path is not set"
    if not (path / "config.json").is_file():
        return None, f"model.path = {path}: no config.json there"
    sizes = [file.stat().st_size for file in path.glob("*.safetensors")]
    return (sum(sizes), "") if sizes else (None, f"model.path = {path}: no *.safetensors there")


async def _vllm_problems(config: IsthmusConfig) -> tuple[str, ...]:
    """What vLLM's environment says of itself; nothing for other engines."""
    if config.engine.kind != "vllm":
        return ()
    python = str(config.engine.python or sys.executable)
    if shutil.which(python) is None:
        return (f"engine.python = {python}: no such interpreter",)
    if config.engine.serve and shutil.which(config.engine.serve[0]) is None:
        return (f"engine.serve: {config.engine.serve[0]}: no such command",)
    said = await _output(python, "-m", "isthmus_worker.vllm_engine.doctor", limit_s=60, codes=(0, 1))
    if not said.strip():
        return (f"{python} has no isthmus-worker",)
    return tuple(json.loads(said)["problems"])


async def _gpus() -> tuple[Gpu, ...]:
    """From nvidia-smi; nothing without it."""
    if shutil.which("nvidia-smi") is None:
        return ()
    fields = "index,name,memory.total,fabric.clusterUuid"
    listed = await _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", limit_s=_QUERY_S)
    if not listed.strip():  # an older driver knows no fabric
        fields = "index,name,memory.total"
        listed = await _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", limit_s=_QUERY_S)
    peers = parse_peers(await _output("nvidia-smi", "topo", "-p2p", "r", limit_s=_QUERY_S))
    return parse_gpus(listed, peers)


def parse_gpus(listed: str, peers: dict[int, tuple[int, ...]]) -> tuple[Gpu, ...]:
    """Lines `index, name, MiB[, fabric cluster]` of nvidia-smi."""
    found: list[Gpu] = []
    for line in listed.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) < 3 or not parts[0].isdigit() or not parts[2].isdigit():
            continue
        cluster = parts[3] if len(parts) > 3 and "-" in parts[3] and set(parts[3]) - set("0-") else ""
        index = int(parts[0])
        found.append(Gpu(index, parts[1], int(parts[2]) << 20, cluster, peers.get(index, ())))
    return tuple(found)


def parse_peers(matrix: str) -> dict[int, tuple[int, ...]]:
    """The matrix of `nvidia-smi topo -p2p r`: OK where one GPU can read another's memory."""
    found: dict[int, tuple[int, ...]] = {}
    for line in matrix.splitlines():
        words = line.split()
        if words and words[0].startswith("GPU") and words[0][3:].isdigit() and len(words) > 1 and "GPU" not in words[1]:
            found[int(words[0][3:])] = tuple(index for index, word in enumerate(words[1:]) if word == "OK")
    return found


async def _output(*command: str, limit_s: float, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints; nothing when it ends with another code or takes too long."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        out, _ = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ""
    return out.decode(errors="replace") if process.returncode in codes else ""
