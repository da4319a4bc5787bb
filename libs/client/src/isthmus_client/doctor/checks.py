"""The checks. Each takes values and returns findings; none looks at the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from isthmus_client.doctor.facts import Facts
from isthmus_client.doctor.findings import Finding, Level
from isthmus_core.config import IsthmusConfig

Check = Callable[[IsthmusConfig, Facts], Iterable[Finding]]
_GIB = 1 << 30


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"


def check_system(_config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Operating system and interpreter."""
    if facts.system != "Linux" or facts.machine != "x86_64":
        text = f"{facts.system} on {facts.machine}"
        yield Finding("system", Level.BROKEN, text, "NIXL has wheels for Linux on x86-64 only: use the containers")
    elif facts.python < (3, 11):
        text = f"Python {facts.python[0]}.{facts.python[1]}"
        yield Finding("system", Level.BROKEN, text, "use Python 3.11 or newer")
    else:
        text = f"Linux, Python {facts.python[0]}.{facts.python[1]}, {facts.cores} cores, {_gib(facts.memory_bytes)}"
        yield Finding("system", Level.OK, text)
    if facts.open_files < 4096:
        yield Finding("open files", Level.NOTE, f"at most {facts.open_files}", "raise the limit: ulimit -n 65536")


def check_packages(config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """What the configuration needs to be installed, and versions that must agree."""
    needed = {"grpcio": "isthmus-core"}
    if config.engine.kind == "torch":
        needed |= {"torch": "isthmus-worker[torch]", "safetensors": "isthmus-worker[torch]"}
    for name, where in needed.items():
        if name not in facts.versions:
            yield Finding("packages", Level.BROKEN, f"{name} is not installed", f"pip install '{where}'")
    nixl = [name for name in ("nixl-cu12", "nixl-cu13") if name in facts.versions]
    if config.transfer.backend == "nixl":
        if not nixl:
            remedy = "pip install 'kvtransfer[nixl-cu12]' (or nixl-cu13)"
            yield Finding("NIXL", Level.BROKEN, "transfer.backend = nixl, but it is not installed", remedy)
        else:
            yield Finding("NIXL", Level.OK, ", ".join(f"{name} {facts.versions[name]}" for name in nixl))
    for problem in facts.vllm_problems:
        yield Finding("vLLM", Level.BROKEN, problem, "make setup-vllm, or engine.python")
    major = facts.versions.get("torch-cuda", "").partition(".")[0]
    if major and nixl and f"nixl-cu{major}" not in nixl:
        text = f"torch uses CUDA {major}, NIXL is {', '.join(nixl)}"
        yield Finding("NIXL", Level.BROKEN, text, f"pip install nixl-cu{major}: one CUDA major in a process")


def check_ports(_config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Addresses to listen on are free, addresses of others answer."""
    for address in facts.busy_ports:
        remedy = "stop that process or change the setting"
        yield Finding("ports", Level.BROKEN, f"{address}: another process listens there", remedy)
    for address, reason in facts.unreachable.items():
        yield Finding("network", Level.NOTE, f"{address}: {reason}", "start it first, or correct the address")


def check_credentials(_config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Files of API keys and certificates."""
    for problem, broken in facts.credential_problems:
        remedy = "isthmus keys, isthmus certs, or your PKI; services read the files again by themselves"
        yield Finding("credentials", Level.BROKEN if broken else Level.NOTE, problem, remedy)


def check_memory(config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Model and cache fit."""
    if facts.model_problem:
        yield Finding("model", Level.BROKEN, facts.model_problem, "give a folder with config.json and safetensors")
    device = config.engine.device
    if device.startswith("cuda"):
        index = int(device.partition(":")[2] or 0)
        chosen = [gpu for gpu in facts.gpus if gpu.index == index]
        if not chosen:
            text = f"engine.device = {device}: {len(facts.gpus)} NVIDIA GPUs here"
            yield Finding("GPU", Level.BROKEN, text, "install the driver, or set engine.device = cpu")
            return
        limit, where = chosen[0].memory_bytes, chosen[0].name
    else:
        limit, where = facts.free_memory_bytes, "free memory"
    wanted = (facts.model_bytes or 0) + config.engine.kv_cache_bytes
    if config.engine.kind != "mock" and config.engine.num_blocks is None and wanted > limit:
        text = f"model and cache want {_gib(wanted)}, {where} has {_gib(limit)}"
        yield Finding("memory", Level.BROKEN, text, "lower engine.kv_cache_bytes or split the model (parallel.*)")
    elif facts.model_bytes is not None:
        yield Finding("memory", Level.OK, f"model and cache want {_gib(wanted)} of {_gib(limit)} ({where})")


def check_paths(config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Which ways the cache can take from here."""
    if config.transfer.backend != "nixl":
        return
    if facts.ptrace_scope > 1:
        text = f"kernel.yama.ptrace_scope = {facts.ptrace_scope}: one process may not read another (no CMA)"
        yield Finding("path", Level.NOTE, text, "caches between two processes here go over TCP; set it to 0 or 1")
    if facts.shm_bytes < 64 << 20:
        text = f"/dev/shm has {facts.shm_bytes >> 20} MiB"
        yield Finding("path", Level.NOTE, text, "containers: shm_size: 1gb")
    if not facts.rdma_devices:
        yield Finding("path", Level.NOTE, "no RDMA device", "between hosts the cache goes over TCP")
    else:
        yield Finding("path", Level.OK, f"RDMA: {', '.join(facts.rdma_devices)}")
    yield from check_ucx(facts.environ)


def check_ucx(environ: Mapping[str, str]) -> Iterable[Finding]:
    """UCX variables that are known to bite."""
    tls = environ.get("UCX_TLS", "")
    names = set(tls.replace("^", "").split(","))
    if tls and not tls.startswith("^") and not names & {"tcp", "all"}:
        text = f"UCX_TLS = {tls}: without tcp"
        yield Finding("UCX", Level.BROKEN, text, "add tcp: connections are made over it even where data is not")
    if environ.get("UCX_MAX_RNDV_RAILS", "") not in ("", "1"):
        text = f"UCX_MAX_RNDV_RAILS = {environ['UCX_MAX_RNDV_RAILS']}"
        yield Finding("UCX", Level.NOTE, text, "several rails split every write; measure with `isthmus probe`")
    if environ.get("UCX_CUDA_IPC_ENABLE_MNNVL", "").lower() in ("n", "no", "0", "off"):
        text = "UCX_CUDA_IPC_ENABLE_MNNVL is off"
        yield Finding("UCX", Level.NOTE, text, "GPUs of one NVLink domain on several hosts then use the network")
    if "UCX_NET_DEVICES" in environ:
        text = f"UCX_NET_DEVICES = {environ['UCX_NET_DEVICES']}"
        yield Finding(
            "UCX", Level.NOTE, text, "only these are used: every rank must be able to reach its peers by them"
        )
    if environ.get("UCX_RNDV_SCHEME", "auto") != "auto":
        text = f"UCX_RNDV_SCHEME = {environ['UCX_RNDV_SCHEME']}"
        yield Finding("UCX", Level.NOTE, text, "a forced scheme can turn one-sided writes into copies through the host")


def check_gpus(_config: IsthmusConfig, facts: Facts) -> Iterable[Finding]:
    """Peer access and NVLink domains."""
    for gpu in facts.gpus:
        others = {other.index for other in facts.gpus} - {gpu.index}
        missing = sorted(others - set(gpu.peers))
        if missing:
            text = f"GPU {gpu.index} can not reach the memory of GPU {', '.join(map(str, missing))}"
            yield Finding("GPU", Level.NOTE, text, "caches between them go through the host; see nvidia-smi topo -m")
    domains = {gpu.fabric_cluster for gpu in facts.gpus if gpu.fabric_cluster}
    if domains:
        yield Finding("NVLink", Level.OK, f"domain {', '.join(sorted(domains))}", "both sides should show the same one")
    if facts.gpus and "expandable_segments:true" in facts.environ.get("PYTORCH_CUDA_ALLOC_CONF", "").lower():
        text = "PYTORCH_CUDA_ALLOC_CONF has expandable_segments: such memory can not be shared between processes"
        yield Finding("GPU", Level.BROKEN, text, "remove it: hand-offs are hundreds of times slower with it")


def check_config(config: IsthmusConfig, _facts: Facts) -> Iterable[Finding]:
    """Settings that contradict each other, or endanger others."""
    if config.worker.role != "context_and_generation" and config.transfer.backend is None:
        text = f"worker.role = {config.worker.role}, transfer.backend is not set"
        yield Finding("config", Level.BROKEN, text, "set transfer.backend = nixl")
    if not config.tls.enabled and not config.worker.listen.startswith(("127.", "localhost", "[::1]")):
        text = f"worker.listen = {config.worker.listen} without tls"
        yield Finding("security", Level.NOTE, text, "anybody who reaches it may use it; see docs/security.md")


def check_peer(config: IsthmusConfig, peer: IsthmusConfig) -> Iterable[Finding]:
    """Two configurations that are to be the sides of a hand-off."""
    pairs = {
        "model": (config.model.served_name, peer.model.served_name),
        "model.dtype": (config.model.dtype, peer.model.dtype),
        "transfer.backend": (config.transfer.backend, peer.transfer.backend),
        "tls": (config.tls.enabled, peer.tls.enabled),
    }
    wrong = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
    for name, (mine, yours) in wrong.items():
        yield Finding("peer", Level.BROKEN, f"{name}: mine {mine}, yours {yours}", "make them equal")
    roles = {config.worker.role, peer.worker.role}
    if roles != {"context", "generation"}:
        text = f"worker.role: mine {config.worker.role}, yours {peer.worker.role}"
        yield Finding("peer", Level.BROKEN, text, "a pair is one context and one generation instance")
    if not wrong:
        text = "what two configurations can tell agrees; weights and geometry are compared when the pair meets"
        yield Finding("peer", Level.OK, text)


CHECKS: tuple[Check, ...] = (
    check_system,
    check_packages,
    check_config,
    check_ports,
    check_credentials,
    check_memory,
    check_paths,
    check_gpus,
)


def check_all(config: IsthmusConfig, facts: Facts, peer: IsthmusConfig | None = None) -> list[Finding]:
    """Every finding."""
    found = [finding for check in CHECKS for finding in check(config, facts)]
    return found + (list(check_peer(config, peer)) if peer is not None else [])
