"""The coordinator process."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus_core.config_section import Section


class PlacementConfig(Section):
    """How the coordinator weighs instances. Costs are counted in prompt tokens to compute."""

    load_weight: float = Field(
        default=1.0, ge=0, le=1000, description="cost of a prompt token that waits at an instance; 0 ignores queues"
    )
    decode_weight: float = Field(
        default=0.05, ge=0, le=1000, description="cost of a token of an open request at a generation instance"
    )
    balance_weight: float = Field(
        default=0.1,
        ge=0,
        le=1000,
        description="cost of a token that an instance has lately been given more than the mean: spreads popular texts",
    )
    prefill_tokens_per_s: float = Field(
        default=10_000.0, gt=0, le=1e9, description="what an instance computes; turns hand-off seconds into tokens"
    )
    overload_factor: float = Field(
        default=1.25, ge=1, le=100, description="a conversation leaves an instance with this many times the mean load"
    )
    overload_slack_tokens: int = Field(
        default=4096, ge=0, le=1 << 40, description="load above the mean that is never called overload"
    )


class MembersConfig(Section):
    """Instances that do not look for a coordinator themselves (`worker.coordinator: null`), as host:port of their hubs:
    for clusters without a place where everybody meets."""

    context: list[str] = Field(default=[], description="context instances")
    generation: list[str] = Field(default=[], description="generation instances")
    context_and_generation: list[str] = Field(default=[], description="instances that do both")


class CoordinatorConfig(Section):
    """The coordinator process."""

    listen: str = Field(default="127.0.0.1:50050", description="host:port of the gRPC server")
    lease_ttl_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="a router stops minting ids when its stream has been broken for this long",
    )
    id_grace_s: float | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="a restarted coordinator grants no new id bits for this long; default lease_ttl_s; 0 when it is "
        "certain that no router of an earlier coordinator lives",
    )
    policy: Literal["kv_aware", "least_load", "round_robin", "affinity"] = Field(
        default="kv_aware",
        description="kv_aware: where most of the prompt is cached and least work waits; least_load; round_robin; "
        "affinity: a conversation stays where it is",
    )
    members: MembersConfig = Field(default_factory=MembersConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    index_blocks: int = Field(
        default=1 << 24,
        ge=1,
        le=1 << 30,
        description="most different KV blocks in the prefix index (about 45 bytes each, and 10 for every holder)",
    )
