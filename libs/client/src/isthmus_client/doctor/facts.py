"""What is known about a machine: values that `machine` collects and `checks` judges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Gpu:
    """One NVIDIA GPU. `fabric_cluster`: UUID of its NVLink domain, empty where there is none. `peers`: indexes of the
    GPUs whose memory it can reach directly."""

    index: int
    name: str
    memory_bytes: int
    fabric_cluster: str = ""
    peers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine. `versions` by distribution; absent: not installed. `busy_ports`: host:port that somebody listens on.
    `unreachable`: addresses of other services that do not answer, with the reason. `credential_problems`: of keys and
    certificates, each with whether nothing works because of it."""

    python: tuple[int, int]
    system: str
    machine: str
    memory_bytes: int
    free_memory_bytes: int
    shm_bytes: int
    cores: int
    open_files: int
    ptrace_scope: int
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    busy_ports: tuple[str, ...] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict[str, str])
    rdma_devices: tuple[str, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    model_bytes: int | None = None
    model_problem: str = ""
    vllm_problems: tuple[str, ...] = ()
    credential_problems: tuple[tuple[str, bool], ...] = ()
