"""What NIXL's UCX needs from the machine and the environment, and which way the bytes take."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import struct
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

import xxhash

from kvtransfer.errors import AgentError, AgentUnavailable

WHEELS = ("nixl_cu13", "nixl_cu12")
_RDMA_DEVICES = Path("/sys/class/infiniband")
_CMA = frozenset({"cma", "sm", "shm", "all"})
_RDMA = frozenset({"ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "dc", "dc_x", "dc_mlx5", "ud", "ud_v", "ud_x"})
_UCX = "nixl/ucx"
_HEADER = struct.Struct("<4sIQ16s16s")
_MAGIC = b"IKN1"


def choose_wheel(torch_cuda: str | None, installed: tuple[str, ...]) -> str:
    """Module name of the NIXL wheel to load. `torch_cuda`: CUDA version of a torch that is loaded already, or None.

    Raises AgentUnavailable: two CUDA majors in one process do not work.
    """
    if torch_cuda:
        wanted = f"nixl_cu{torch_cuda.split('.')[0]}"
        if wanted in installed:
            return wanted
        package = wanted.replace("_", "-")
        raise AgentUnavailable(f"torch uses CUDA {torch_cuda}, so NIXL must be {package}: pip install {package}")
    if not installed:
        raise AgentUnavailable("NIXL is not installed: pip install 'kvtransfer[nixl-cu12]' or 'kvtransfer[nixl-cu13]'")
    return installed[0]


def installed_wheels() -> tuple[str, ...]:
    """NIXL wheels of this environment, in order of preference."""
    return tuple(name for name in WHEELS if importlib.util.find_spec(name) is not None)


def loaded_torch_cuda() -> str | None:
    """CUDA version of torch if something else has imported it; never imports it."""
    version = getattr(sys.modules.get("torch"), "version", None)
    cuda = getattr(version, "cuda", None)
    return cuda if isinstance(cuda, str) else None


def has_rdma() -> bool:
    """True when the kernel shows an RDMA device."""
    try:
        return any(_RDMA_DEVICES.iterdir())
    except OSError:
        return False


def prepare_environment(environ: MutableMapping[str, str], rdma: bool) -> None:
    """Before the first agent of the process. Raises AgentUnavailable when UCX can not work with what is set."""
    # Otherwise NIXL's own logger greets on standard output.
    environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if not rdma:
        # UCX's InfiniBand module loads a library that crashes the process at exit; without a device it is useless.
        environ.setdefault("UCX_MODULES", "^ib")
    tls = environ.get("UCX_TLS", "")
    if not tls:
        return
    allowed = allowed_transports(tls, {"tcp", *(_RDMA if rdma else ())})
    if not allowed:
        # Only these report a peer that died; without one UCX refuses, or a write to a dead peer waits for ever.
        raise AgentUnavailable(f"UCX_TLS={tls} has no transport that notices a dead peer: add tcp to UCX_TLS")


def allowed_transports(tls: str, candidates: set[str] | frozenset[str]) -> set[str]:
    """Which candidates UCX_TLS leaves: a list of names, `all`, or `^` and a list of names that are left out."""
    names = set(tls.lstrip("^").split(","))
    if tls.startswith("^"):
        return {one for one in candidates if one not in names}
    if not tls or "all" in names:
        return set(candidates)
    return {one for one in candidates if one in names or (one in _RDMA and "ib" in names)}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs: kernel boot, pid namespace, pid. Equal boot and namespace: its pid means the same here."""

    boot: bytes
    namespace: int
    pid: int

    @classmethod
    def here(cls) -> Place:
        """This process."""
        boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        return cls(boot, Path("/proc/self/ns/pid").stat().st_ino, os.getpid())


def pack_metadata(place: Place, metadata: bytes) -> bytes:
    """magic | pid | pid namespace | boot id | xxh3_128 of the rest | NIXL's own metadata."""
    digest = xxhash.xxh3_128_digest(metadata)
    return _HEADER.pack(_MAGIC, place.pid, place.namespace, place.boot, digest) + metadata


def unpack_metadata(data: bytes, owner: str) -> tuple[Place, bytes]:
    """Raises AgentError when the bytes are cut or altered: NIXL itself does not always notice."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise AgentError(f"metadata of agent {owner}: {len(data)} bytes that no NIXL agent of this version wrote")
    _, pid, namespace, boot, digest = _HEADER.unpack_from(data)
    metadata = data[_HEADER.size :]
    if xxhash.xxh3_128_digest(metadata) != digest:
        raise AgentError(f"metadata of agent {owner} was altered on its way")
    return Place(boot, namespace, pid), metadata


def can_read_process(pid: int, address: int) -> bool:
    """Asks the kernel whether this process may access memory of `pid` directly, as UCX's cma transport does."""
    libc = ctypes.CDLL(None, use_errno=True)
    byte = ctypes.create_string_buffer(1)
    pair = ctypes.c_void_p * 2
    local, remote = pair(ctypes.addressof(byte), 1), pair(address, 1)
    zero = ctypes.c_ulong(0)
    one = ctypes.c_ulong(1)
    return libc.process_vm_readv(ctypes.c_int(pid), local, one, remote, one, zero) == 1


def describe_path(tls: str, rdma: bool, same_host: bool, direct: bool, device_memory: bool) -> str:
    """Honest name of the way bytes take. `direct`: the kernel lets this process access the peer's memory.

    UCX does not tell which transport it took, so only what follows from the rules is named: for host memory it prefers
    cma on one host, and without it and RDMA nothing but tcp is left.
    """
    return " ".join((_UCX, *_path_parts(tls, rdma, same_host, direct, device_memory)))


def possible_paths(tls: str, rdma: bool, device_memory: bool) -> tuple[str, ...]:
    """Every way that `describe_path` may name in this process, without the part about UCX_TLS."""
    network = rdma and bool(allowed_transports(tls, _RDMA))
    paths = [f"{_UCX} device memory same host", f"{_UCX} device memory network"] if device_memory else []
    if allowed_transports(tls, {"cma", "sm", "shm"}):
        paths.append(f"{_UCX} cma")
    paths.append(f"{_UCX} rdma or tcp" if network else f"{_UCX} tcp")
    return tuple(paths)


def _path_parts(tls: str, rdma: bool, same_host: bool, direct: bool, device_memory: bool) -> Iterator[str]:
    network = rdma and bool(allowed_transports(tls, _RDMA))
    if device_memory:
        yield "device memory"
        yield "same host" if same_host else "network"
    elif same_host and direct and allowed_transports(tls, {"cma", "sm", "shm"}):
        yield "cma"
    elif not network:
        yield "tcp"
    else:
        yield "rdma or tcp"
    if tls:
        yield f"(UCX_TLS={tls})"
