"""The section `transfer` of the configuration."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from isthmus_core.config_section import Section


class TransferConfig(Section):
    """The hand-off. There is no default backend: an instance that hands off must name one."""

    backend: str | None = Field(
        default=None, min_length=1, max_length=60, description="transfer agent, for example nixl"
    )
    handoff_hold_s: float = Field(default=30.0, gt=0, le=3600, description="a context instance holds pages this long")
    timeout_s: float = Field(
        default=30.0, gt=0, le=3600, description="a generation instance waits this long for a cache"
    )
    drain_s: float = Field(
        default=0.5, ge=0, le=60, description="bytes of a dead writer may land this long after its exit is known"
    )
    ping_interval_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="quiet streams are pinged this often; one that leaves three pings unanswered is reopened",
    )
    in_doubt_s: float = Field(
        default=10.0,
        gt=0,
        le=3600,
        description="writers of a failed hand-off may take this long to finish; then their hub is asked to kill them",
    )
    fence_writer: bool = Field(
        default=True, description="ask the hub of silent writers to kill them; otherwise the pages they may write leak"
    )
    leak_budget_bytes: int = Field(
        default=1 << 30,
        ge=0,
        description="cache memory that writers which can not be reached may hold; beyond it the instance stops",
    )
    max_held_requests: int = Field(
        default=256, gt=0, le=1 << 20, description="finished prefills that may wait for their generation instance"
    )
    max_held_share: float = Field(
        default=0.5, gt=0, le=1, description="share of the cache that finished prefills may hold while they wait"
    )
    on_transfer_failure: Literal["recompute", "fail"] = Field(
        default="recompute",
        description="after a hand-off failed and one retry did not help: the generation instance computes the prompt "
        "itself, or the request fails",
    )
    reserve_early: bool = Field(
        default=False,
        description="generation_first: take the pages for the prompt when the request comes, not when its context leg "
        "is scheduled: the bytes wait for nobody, the pages may wait long",
    )
    layer_wise: bool = Field(
        default=False,
        description="generation_first, engine.kind = torch: the end of a prompt is sent layer by layer while later "
        "layers are computed",
    )
    fill_gate: int = Field(
        default=0,
        ge=0,
        le=65_536,
        description="for measuring: a generation instance that was idle decodes nothing before so many caches have "
        "arrived on every rank; fewer requests than that wait for ever",
    )
    max_peers: int = Field(
        default=64,
        gt=0,
        le=4096,
        description="streams to context instances that are kept open; the one that was not used longest is closed",
    )
    probe_on_connect: bool = Field(
        default=False,
        description="a context instance measures the way to a generation instance with real bytes before it is used",
    )
    staging_policy: Literal["cost", "blocks_96", "bytes_2mib", "small_descriptors", "always", "never"] = Field(
        default="cost",
        description="who decides that small runs are gathered into chunks: the cost model, one of the fixed gates of "
        "other systems, always or never",
    )
    arena_bytes: int | None = Field(
        default=None,
        ge=0,
        le=1 << 40,
        description="memory of every rank for chunks, beside the cache; at least 1 MiB for each of max_peers; default: "
        "that, but at least 64 MiB on a host (pages that are never touched cost nothing), and on a device a 64th of "
        "its memory, at most 512 MiB; 0: small runs are never gathered",
    )
    bounce_chunk_bytes: int = Field(
        default=256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="chunks are at most this large; the cost model chooses less",
    )
    bounce_depth: int = Field(
        default=4,
        ge=1,
        le=64,
        description="chunks of one transfer that are gathered, written and scattered at once, at most",
    )
    cost_file: str | None = Field(
        default=None, min_length=1, description="where the measured costs of paths are kept between starts"
    )
    require_path: str | None = Field(
        default=None,
        min_length=1,
        max_length=60,
        description="words the name of the way must contain, for example cma or device memory; an instance that can "
        "never take it does not start, pairs are measured when they meet and refused on another one",
    )
