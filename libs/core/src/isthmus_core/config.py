"""The one configuration schema. Every process reads the same YAML file and uses its own sections.

Unknown keys are refused with the nearest known name; values are checked by raising, never by clamping.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from isthmus_core.config_cache import CacheConfig as CacheConfig
from isthmus_core.config_coordinator import CoordinatorConfig as CoordinatorConfig
from isthmus_core.config_parallel import ParallelConfig as ParallelConfig
from isthmus_core.config_router import ClientsConfig as ClientsConfig
from isthmus_core.config_router import RouterConfig as RouterConfig
from isthmus_core.config_section import Section
from isthmus_core.config_telemetry import LoggingConfig as LoggingConfig
from isthmus_core.config_telemetry import TelemetryConfig as TelemetryConfig
from isthmus_core.config_transfer import TransferConfig as TransferConfig
from isthmus_core.config_vllm import ADAPTERS, VLLM_ARGUMENTS, VLLM_PYTHON, VLLM_SERVE
from isthmus_core.errors import ConfigError


class WorkerConfig(Section):
    """A worker instance."""

    instance_id: str | None = Field(
        default=None, min_length=1, max_length=120, pattern=r"^[A-Za-z0-9._-]+$", description="default: role-port"
    )
    role: Literal["context", "generation", "context_and_generation"] = Field(
        default="context_and_generation", description="what the instance does with requests"
    )
    listen: str = Field(default="127.0.0.1:0", description="host:port of the hub; port 0 takes a free one")
    advertise: str | None = Field(
        default=None, description="host:port under which others reach the hub; default: listen"
    )
    coordinator: str | None = Field(
        default="127.0.0.1:50050",
        description="host:port of the coordinator; null: none, the one that has this instance in coordinator.members "
        "comes to it",
    )
    start_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="exit when the coordinator is not reached by then"
    )
    engine_start_timeout_s: float = Field(
        default=300.0, gt=0, le=7200, description="exit when the engine is not ready by then"
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="requests and hand-offs may take this long after SIGTERM"
    )
    state_dir: Path = Field(
        default=Path("/tmp/isthmus"),
        description="host-local folder of instance locks; the same for every start of an instance",
    )


class ModelConfig(Section):
    """The model, the same for router and workers."""

    path: Path | None = Field(default=None, description="folder with config.json, *.safetensors, tokenizer.json")
    name: str | None = Field(
        default=None, min_length=1, max_length=200, description="served name; default: the folder's name"
    )
    tokenizer: Literal["auto", "byte"] = Field(
        default="auto",
        description="auto: tokenizer.json of the folder, whose token ids the mock engine takes too; byte: built in, "
        "id = byte value (mock clusters)",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="auto: as the checkpoint says"
    )

    @property
    def served_name(self) -> str:
        """Name that clients ask for. Raises ConfigError when neither name nor path is set."""
        if self.name is not None:
            return self.name
        if self.path is None:
            raise ConfigError("model.path is not set: write the model's folder, or model.name for a mock engine")
        return self.path.name


class MockConfig(Section):
    """The mock engine."""

    seed: int = Field(default=0, ge=0, lt=1 << 32, description="another seed is another model")
    layers: int = Field(default=2, ge=1, le=1024, description="layers of its cache")
    bytes_per_token: int = Field(
        default=8, ge=8, le=1 << 20, multiple_of=8, description="bytes of K (and of V) a token and layer"
    )
    sliding_window: int | None = Field(
        default=None, ge=1, le=1 << 24, description="every second layer sees only so many positions; default: all"
    )
    max_model_len: int = Field(default=8192, ge=2, le=1 << 24, description="longest prompt plus output")
    prefill_us_per_token: float = Field(default=0.0, ge=0, le=1e6, description="time a prompt token takes")
    decode_us: float = Field(default=0.0, ge=0, le=1e7, description="time a decode step takes")


class EngineConfig(Section):
    """The engine of a worker."""

    kind: Literal["torch", "mock", "vllm"] = Field(default="torch", description="which engine")
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N")
    attention: Literal["auto", "sdpa", "flashinfer"] = Field(
        default="auto",
        description="kernels of the torch engine; auto: flashinfer where it is installed and can compute the model, "
        "else sdpa (torch's own); the log says which and why",
    )
    num_threads: int | None = Field(
        default=None, ge=1, le=1024, description="CPU threads of the engine; default: torch's choice"
    )
    tokens_per_block: int = Field(default=16, ge=1, le=1024, description="tokens of one KV block")
    num_blocks: int | None = Field(
        default=None, ge=1, le=1 << 26, description="KV blocks; default: from kv_cache_bytes"
    )
    kv_cache_bytes: int = Field(
        default=1 << 30, ge=1 << 16, description="memory for KV blocks when num_blocks is not set"
    )
    max_model_len: int | None = Field(default=None, ge=2, le=1 << 24, description="default: the model's context length")
    max_running: int = Field(default=64, ge=1, le=65_536, description="rows of one step")
    max_batch_tokens: int = Field(
        default=512, ge=1, le=1 << 20, description="tokens of one step; longer prompts go in chunks"
    )
    max_waiting: int = Field(
        default=1024, ge=1, le=1 << 20, description="requests waiting for a place; more are refused"
    )
    prefix_caching: bool = Field(
        default=True, description="keep KV blocks of finished requests and reuse them for prompts that begin alike"
    )
    draft_tokens: int = Field(
        default=0,
        ge=0,
        le=64,
        description="a context instance sends so many guesses along with the first token, what followed the same words "
        "in the prompt; the generation instance checks them in its first step, and the text is the same without them",
    )
    mock: MockConfig = Field(default_factory=MockConfig)
    vllm: dict[str, Any] = VLLM_ARGUMENTS
    serve: list[str] = VLLM_SERVE
    adapters: dict[str, Path] = ADAPTERS
    python: Path | None = VLLM_PYTHON


class TlsConfig(Section):
    """Certificates of every gRPC hop. All three or none."""

    ca: Path | None = Field(default=None, description="PEM file that peers' certificates are checked against")
    cert: Path | None = Field(default=None, description="PEM file of this process's certificate chain")
    key: Path | None = Field(default=None, description="PEM file of its private key")
    roles: bool = Field(
        default=True,
        description="callers may do what the role in their certificate may do (docs/security.md); "
        "false: everybody may do everything",
    )

    @model_validator(mode="after")
    def _all_or_none(self) -> TlsConfig:
        given = [name for name in ("ca", "cert", "key") if getattr(self, name) is not None]
        if given and len(given) < 3:
            raise ValueError(f"only {', '.join(given)} set; set ca, cert and key, or none of them")
        return self

    @property
    def enabled(self) -> bool:
        """True when the hops are encrypted and both ends are authenticated."""
        return self.ca is not None


class IsthmusConfig(Section):
    """All sections."""

    coordinator: CoordinatorConfig = Field(default_factory=CoordinatorConfig)
    router: RouterConfig = Field(default_factory=RouterConfig)
    worker: WorkerConfig = Field(default_factory=WorkerConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    cache: CacheConfig = Field(default_factory=CacheConfig)
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    transfer: TransferConfig = Field(default_factory=TransferConfig)
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig)
    tls: TlsConfig = Field(default_factory=TlsConfig)
    logging: LoggingConfig = Field(default_factory=LoggingConfig)


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> IsthmusConfig:
    """The configuration in a YAML file, changed by `section.key=value` overrides (values are YAML).

    Raises ConfigError with one line per problem: the key, its value, what would be accepted.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigError(f"config file {path}: {error.strerror}") from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"config file {path} is not YAML: {error}") from error
        if loaded is not None and not isinstance(loaded, dict):
            raise ConfigError(f"config file {path}: the top level must be sections, not {type(loaded).__name__}")
        data = cast("dict[str, Any]", loaded or {})
    for override in overrides:
        set_key(data, override)
    return parse_config(data)


def parse_config(data: dict[str, Any]) -> IsthmusConfig:
    """The configuration in a mapping. Raises ConfigError."""
    try:
        return IsthmusConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(error))) from error


def set_key(data: dict[str, Any], text: str) -> None:
    """Puts one override, section.key=value, into a mapping of sections. Raises ConfigError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"--set {text}: write section.key=value")
    *sections, last = key.strip().split(".")
    for name in sections:
        below = data.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set {text}: {name} is a value, not a section")
        data = cast("dict[str, Any]", below)
    try:
        data[last] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {text}: the value is not YAML: {error}") from error


def _explain(error: ValidationError) -> Iterable[str]:
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            near = difflib.get_close_matches(where, known_keys(), n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(_siblings(where))}"
            yield f"unknown key {where}{hint}"
        else:
            yield f"{where} = {problem['input']!r}: {problem['msg']}"


def _siblings(where: str) -> list[str]:
    parent = where.rpartition(".")[0]
    return sorted(key for key in known_keys(sections=True) if key.rpartition(".")[0] == parent)


def known_keys(*, sections: bool = False) -> list[str]:
    """Every key of the schema as section.key; with `sections` the sections themselves too."""

    def walk(model: type[BaseModel], prefix: str) -> Iterable[str]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                if sections:
                    yield prefix + name
                yield from walk(kind, f"{prefix}{name}.")
            else:
                yield prefix + name

    return list(walk(IsthmusConfig, ""))
