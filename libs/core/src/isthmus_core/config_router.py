"""The router's section of the configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from isthmus_core.config_section import Section

EMBEDDED = "embedded"


class RetryConfig(Section):
    """What happens when an instance fails under a request."""

    max_attempts: int = Field(default=3, ge=1, le=100, description="tries of one request, the first one included")
    pause_s: float = Field(default=0.1, ge=0, le=60, description="pause before the third try; doubled with each one")
    longest_pause_s: float = Field(default=2.0, ge=0, le=600, description="longest pause between two tries")
    budget_share: float = Field(
        default=0.2,
        ge=0,
        le=10,
        description="further tries of all requests together, as a share of all requests (bursts of 100 are allowed); "
        "0: no request is tried again",
    )
    breaker_failures: int = Field(
        default=3, ge=1, le=10_000, description="an instance that failed so often in a row gets no requests for a while"
    )
    breaker_s: float = Field(
        default=1.0, gt=0, le=600, description="for how long; doubled with each time, up to thirty times as long"
    )


class LocalPrefillConfig(Section):
    """When a generation instance prefills a prompt itself: where that costs less than handing the cache off.

    The rule: uncached tokens * prefill_us_per_token <= handoff_us + prompt tokens * handoff_us_per_token.
    """

    enabled: bool = Field(default=False, description="short uncached prompts go straight to a generation instance")
    prefill_us_per_token: float = Field(
        default=50.0, gt=0, le=1e6, description="what a prompt token costs the answers that a generation instance makes"
    )
    handoff_us: float = Field(default=3000.0, ge=0, le=1e8, description="what a hand-off costs whatever its length")
    handoff_us_per_token: float = Field(default=1.0, ge=0, le=1e6, description="what each token of the prompt adds")


class AdmissionConfig(Section):
    """How many requests a router process works on, and who waits."""

    max_running: int = Field(default=1024, ge=1, le=1 << 20, description="requests at instances at the same time")
    max_waiting: int = Field(
        default=1024, ge=0, le=1 << 20, description="requests that wait for one of these places; more are refused"
    )
    max_waiting_per_tenant: int = Field(
        default=256, ge=0, le=1 << 20, description="of which so many may be one tenant's; the tenants take turns"
    )
    max_wait_s: float = Field(default=10.0, gt=0, le=3600, description="longest wait; then the request is refused")
    tenant_header: str = Field(
        default="x-tenant-id",
        pattern=r"^[a-z0-9-]+$",
        max_length=64,
        description="header (gRPC: metadata) that names the tenant; without it the API key does",
    )


class ClientsConfig(Section):
    """Who may ask a router, and for how much."""

    keys_file: Path | None = Field(
        default=None,
        description="YAML list of API keys (`isthmus keys`), read again when it changes; clients show one as "
        "`authorization: Bearer KEY`, over HTTP and gRPC; null: everybody may ask",
    )
    requests_per_s: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="requests of one client (key; without keys: tenant) at one router process; a key may have its own",
    )
    tokens_per_min: float | None = Field(
        default=None, gt=0, le=1e12, description="prompt and answer tokens of one client, likewise"
    )


class RouterConfig(Section):
    """A router: one process, or a parent and its worker processes on the same ports."""

    listen: str = Field(default="127.0.0.1:50051", description="host:port of the public gRPC server")
    http_listen: str = Field(default="127.0.0.1:8000", description="host:port of the OpenAI HTTP server")
    num_workers: int = Field(
        default=1,
        ge=1,
        le=63,
        description="processes that share the public ports (SO_REUSEPORT); more than 1: a parent starts them, starts "
        "dead ones again and serves the fleet's health and metrics at router.control_listen",
    )
    control_listen: str = Field(
        default="127.0.0.1:8001",
        description="host:port of /health, /metrics and /drain of the parent; unused with one process",
    )
    coordinator: str = Field(
        default="127.0.0.1:50050",
        description="host:port of the coordinator; embedded: this router runs it at coordinator.listen, in its own "
        "process or, with several worker processes, beside them",
    )
    policy: Literal["coordinator", "round_robin", "power_of_two"] = Field(
        default="coordinator",
        description="who chooses instances: the coordinator (coordinator.policy), or this process by what it knows: in "
        "turn, or the less loaded of two drawn pairs",
    )
    start_timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="exit when the coordinator is not reached by then"
    )
    request_timeout_s: float = Field(
        default=600.0, gt=0, le=86_400, description="deadline of a request whose client sets none"
    )
    client_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=86_400,
        description="a client that takes longer to send its request, or to read a piece of its answer, is dropped",
    )
    max_connections: int = Field(
        default=4096, ge=1, le=1 << 20, description="open HTTP connections, idle ones included; more are refused"
    )
    drain_s: float = Field(default=30.0, ge=0, le=3600, description="running requests may take this long after SIGTERM")
    schedule: Literal["context_first", "generation_first", "by_length"] = Field(
        default="context_first",
        description="generation_first starts both legs of a split request at once: its cache moves while the prompt is "
        "computed; transfer.timeout_s of the generation instance then counts from the start of the request; by_length: "
        "generation_first for prompts of at least router.generation_first_tokens",
    )
    generation_first_tokens: int = Field(
        default=2048, ge=1, le=1 << 24, description="for router.schedule: by_length; shorter prompts are context_first"
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1024, le=1 << 30, description="largest HTTP request body")
    coalesce_ms: float = Field(
        default=0.0,
        ge=0,
        le=1000,
        description="tokens that come within so many milliseconds of the last ones of a stream go out together, as one "
        "event or message; 0: each is one of its own",
    )
    retry: RetryConfig = Field(default_factory=RetryConfig)
    local_prefill: LocalPrefillConfig = Field(default_factory=LocalPrefillConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    clients: ClientsConfig = Field(default_factory=ClientsConfig)

    @model_validator(mode="after")
    def _local_policies_split(self) -> RouterConfig:
        if self.local_prefill.enabled and self.policy != "coordinator":
            raise ValueError(
                f"local_prefill.enabled needs policy: coordinator, which knows what is cached, not {self.policy}"
            )
        return self

    @property
    def embedded(self) -> bool:
        """True when this router runs the coordinator itself."""
        return self.coordinator == EMBEDDED
