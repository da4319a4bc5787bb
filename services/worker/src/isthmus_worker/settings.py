"""The parts of the configuration that a worker uses, checked before anything is started."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from isthmus_core.config import IsthmusConfig
from isthmus_core.errors import ConfigError
from isthmus_core.process import split_address
from kvtransfer.agents import known_agents
from kvtransfer.agents.nixl_env import has_rdma, prepare_environment
from kvtransfer.config import OnFailure, TransferConfig
from kvtransfer.errors import AgentUnavailable
from kvtransfer.rank_info import InstanceRole

_ROLES = {
    "context": InstanceRole.CONTEXT,
    "generation": InstanceRole.GENERATION,
    "context_and_generation": InstanceRole.CONTEXT_AND_GENERATION,
}
# Which network interface the ranks of an instance, all on this host, talk over.
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """A worker's identity and behaviour. `coordinator` None: one that lists this instance comes to it. `transfer` is
    None for an instance that hands nothing off."""

    role: InstanceRole
    model: str
    listen_host: str
    listen_port: int
    advertise: str | None
    coordinator: str | None
    transfer: TransferConfig | None
    start_timeout_s: float
    engine_start_timeout_s: float
    drain_s: float
    state_dir: Path
    given_id: str | None
    role_name: str

    def instance_id(self, port: int) -> str:
        """The configured name, else role and port: both stay the same over restarts of a configured instance."""
        return self.given_id or f"{self.role_name}-{port}"

    def endpoint(self, port: int) -> str:
        """host:port under which routers and peers reach the hub that listens on `port`."""
        if self.advertise is not None:
            host, advertised = split_address(self.advertise, "worker.advertise")
            return join_address(host, advertised or port)
        return join_address(self.listen_host, port)


def join_address(host: str, port: int) -> str:
    """host:port, [v6]:port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def worker_settings(config: IsthmusConfig) -> WorkerSettings:
    """Raises ConfigError naming the key, its value and what to write."""
    worker = config.worker
    host, port = split_address(worker.listen, "worker.listen")
    if worker.advertise is not None:
        split_address(worker.advertise, "worker.advertise")
    elif _is_wildcard(host):
        raise ConfigError(
            f"worker.advertise is not set and worker.listen = {worker.listen} is no address that others can call: "
            "write worker.advertise: HOST:PORT"
        )
    if worker.coordinator is not None:
        split_address(worker.coordinator, "worker.coordinator")
    role = _ROLES[worker.role]
    return WorkerSettings(
        role=role,
        model=config.model.served_name,
        listen_host=host,
        listen_port=port,
        advertise=worker.advertise,
        coordinator=worker.coordinator,
        transfer=None if role is InstanceRole.CONTEXT_AND_GENERATION else transfer_settings(config),
        start_timeout_s=worker.start_timeout_s,
        engine_start_timeout_s=worker.engine_start_timeout_s,
        drain_s=worker.drain_s,
        state_dir=worker.state_dir,
        given_id=worker.instance_id,
        role_name=worker.role,
    )


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a host name


def transfer_settings(config: IsthmusConfig) -> TransferConfig:
    """What kvtransfer needs. Raises ConfigError when no backend is named or an unknown one."""
    transfer = config.transfer
    names = ", ".join(known_agents())
    if transfer.backend is None:
        raise ConfigError(
            f"worker.role = {config.worker.role} hands KV caches off and needs a transfer backend "
            f"(known: {names}); there is no default, write\ntransfer:\n  backend: nixl"
        )
    if transfer.backend not in known_agents():
        raise ConfigError(f"transfer.backend = {transfer.backend}: unknown, use one of {names}")
    if transfer.layer_wise and config.engine.kind != "torch":
        raise ConfigError(
            f"transfer.layer_wise = true: engine.kind = {config.engine.kind} does not say when a layer is computed; "
            "use engine.kind = torch or leave it out"
        )
    return TransferConfig(
        backend=transfer.backend,
        timeout_s=transfer.timeout_s,
        handoff_hold_s=transfer.handoff_hold_s,
        drain_s=transfer.drain_s,
        ping_s=transfer.ping_interval_s,
        in_doubt_s=transfer.in_doubt_s,
        fence_writer=transfer.fence_writer,
        leak_budget_bytes=transfer.leak_budget_bytes,
        max_held_requests=transfer.max_held_requests,
        max_held_share=transfer.max_held_share,
        on_failure=OnFailure(transfer.on_transfer_failure),
        max_peers=transfer.max_peers,
        require_path=transfer.require_path or "",
    )


def engine_threads(config: IsthmusConfig) -> int | None:
    """CPU threads of each rank: engine.num_threads, else the ranks of an instance share the cores; None: the library's
    choice."""
    if config.engine.num_threads is None and config.parallel.world_size > 1:
        return max(1, (os.cpu_count() or 1) // config.parallel.world_size)
    return config.engine.num_threads


def child_environment(config: IsthmusConfig, settings: WorkerSettings) -> dict[str, str]:
    """Environment of the engine processes. Raises ConfigError when the transfer agent can not work with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if (threads := engine_threads(config)) is not None:
        # Libraries size their thread pools when they are loaded, before any code of ours runs.
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(threads)))
    if config.parallel.world_size > 1:
        for name in _INTERFACE_VARIABLES:
            environment.setdefault(name, "lo")
    if settings.transfer is not None and settings.transfer.backend == "nixl":
        try:
            prepare_environment(environment, has_rdma())
        except AgentUnavailable as error:
            raise ConfigError(f"transfer.backend = nixl: {error}") from error
    return environment
