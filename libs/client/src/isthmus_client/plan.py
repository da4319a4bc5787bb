"""What a local cluster consists of: options in, one configuration per process out. Nothing here touches the system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from isthmus_core.config import parse_config, set_key
from isthmus_core.errors import ConfigError

EngineKind = Literal["torch", "mock"]
Settings = dict[str, Any]
# A mock's blocks are tiny: a number of blocks says more than a number of bytes.
MOCK_BLOCKS = 4096
# A person who pressed Ctrl-C waits; services in a fleet get the longer default of the schema.
LOCAL_DRAIN_S = 5.0
_ROLES = {"unsplit": "context_and_generation"}


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """A local cluster. `base` holds settings of the user's file; what is written here wins over it. `own`: overrides
    (section.key=value) of the workers of one kind: context, generation or unsplit."""

    context: int = 1
    generation: int = 1
    unsplit: int = 0
    engine: EngineKind = "torch"
    model_path: Path | None = None
    model_name: str | None = None
    base: Mapping[str, Any] = field(default_factory=dict[str, Any])
    own: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    def settings_of(self, kind: str) -> Settings:
        """What the overrides of a kind say. Raises ConfigError."""
        settings: Settings = {}
        for text in self.own.get(kind, ()):
            set_key(settings, text)
        return settings

    def validate(self) -> None:
        """Raise ConfigError when the options can not make a cluster that serves."""
        for name in ("context", "generation", "unsplit"):
            if (count := getattr(self, name)) < 0:
                raise ConfigError(f"--{name} {count}: at least 0")
        if bool(self.context) != bool(self.generation):
            raise ConfigError(
                f"--context {self.context} --generation {self.generation}: "
                "a split needs at least one of each; both 0 needs --unsplit"
            )
        if self.context + self.generation + self.unsplit == 0:
            raise ConfigError("--context 0 --generation 0 --unsplit 0: nothing to start")
        if self.engine == "torch" and self.model_path is None:
            raise ConfigError("the torch engine needs a model: --model default, a folder, or ORG/NAME")

    @property
    def workers(self) -> list[tuple[str, str]]:
        """(instance id, kind) of every worker."""
        counts = (("context", self.context), ("generation", self.generation), ("unsplit", self.unsplit))
        return [(f"{kind}-{index}", kind) for kind, count in counts for index in range(count)]


@dataclass(frozen=True, slots=True)
class Ports:
    """Loopback ports of a cluster; `workers` in the order of `ClusterOptions.workers`."""

    coordinator: int
    router_grpc: int
    router_http: int
    workers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its name, module, settings, and the address where grpc.health.v1 answers."""

    name: str
    module: str
    settings: Settings
    address: str


def merge(base: Mapping[str, Any], above: Mapping[str, Any]) -> Settings:
    """`above` laid over `base`, section by section; the arguments stay as they are."""
    result: Settings = dict(base)
    for key, value in above.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merge(cast("Mapping[str, Any]", below), cast("Mapping[str, Any]", value))
        else:
            result[key] = value
    return result


def plan_cluster(options: ClusterOptions, ports: Ports, state_dir: Path, cores: int) -> list[ProcessSpec]:
    """Every process of the cluster, coordinator first, router last. Raises ConfigError."""
    options.validate()
    defaults, common = _defaults(options, cores), _common(options)
    coordinator = f"127.0.0.1:{ports.coordinator}"

    def spec(name: str, module: str, address: str, own: Settings) -> ProcessSpec:
        settings = merge(merge(defaults, options.base), merge(common, own))
        parse_config(settings)
        return ProcessSpec(name, module, settings, address)

    specs = [spec("coordinator", "isthmus_coordinator", coordinator, {"coordinator": {"listen": coordinator}})]
    for (instance_id, kind), port in zip(options.workers, ports.workers, strict=True):
        listen = f"127.0.0.1:{port}"
        worker: Settings = {"instance_id": instance_id, "role": _ROLES.get(kind, kind), "listen": listen}
        worker |= {"coordinator": coordinator, "state_dir": str(state_dir)}
        specs.append(spec(instance_id, "isthmus_worker", listen, merge(options.settings_of(kind), {"worker": worker})))
    listen = f"127.0.0.1:{ports.router_grpc}"
    http = f"127.0.0.1:{ports.router_http}"
    router: Settings = {"listen": listen, "http_listen": http, "coordinator": coordinator}
    specs.append(spec("router", "isthmus_router", listen, {"router": router}))
    return specs


def _defaults(options: ClusterOptions, cores: int) -> Settings:
    """Settings that suit one machine; the user's file may change them."""
    # Workers and their ranks compute at the same time: more threads than cores make every one of them slower.
    ranks = 0
    for _, kind in options.workers:
        ranks += parse_config(
            {"parallel": merge(options.base, options.settings_of(kind)).get("parallel", {})}
        ).parallel.world_size
    engine: Settings = {"num_threads": max(1, cores // max(1, ranks))}
    if options.engine == "mock":
        engine["num_blocks"] = MOCK_BLOCKS
    return {
        "transfer": {"backend": "nixl"},
        "engine": engine,
        "router": {"drain_s": LOCAL_DRAIN_S},
        "worker": {"drain_s": LOCAL_DRAIN_S},
    }


def _common(options: ClusterOptions) -> Settings:
    """Settings that all processes share and the options decide."""
    model: Settings = {}
    if options.engine == "mock" and options.model_path is None:
        model = {"name": options.model_name or "mock", "tokenizer": "byte"}
    elif options.model_path is not None:
        model = {"path": str(options.model_path), "name": options.model_name or options.model_path.name}
    return {"engine": {"kind": options.engine}, "model": model}
