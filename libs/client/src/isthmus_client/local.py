"""From the options of `isthmus up` and `isthmus demo` to a cluster that can be started."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from isthmus_client.models import fetch_model
from isthmus_client.plan import ClusterOptions, EngineKind
from isthmus_client.runs import create_run
from isthmus_client.supervisor import LocalCluster, Report, choose_ports
from isthmus_core.config import load_config
from isthmus_core.errors import ConfigError


def read_base(path: Path | None) -> dict[str, Any]:
    """Settings of the user's file, checked against the schema. Raises ConfigError."""
    if path is None:
        return {}
    load_config(path)
    return cast("dict[str, Any]", yaml.safe_load(path.read_text()) or {})


def engine_kind(flag: str | None, base: Mapping[str, Any]) -> EngineKind:
    """The engine: the flag, else the file, else torch. Raises ConfigError for an unknown one."""
    kind = flag or cast("dict[str, Any]", base.get("engine", {})).get("kind", "torch")
    if kind == "torch" or kind == "mock":
        return kind
    raise ConfigError(f"--engine {kind}: unknown engine; known: torch, mock")


async def prepare_cluster(
    *,
    context: int,
    generation: int,
    unsplit: int,
    engine: str | None,
    model: str | None,
    config: Path | None,
    log_dir: Path | None,
    ports: tuple[int, int, int],
    report: Report,
    own: Mapping[str, Sequence[str]] | None = None,
) -> LocalCluster:
    """Check the options, prove the ports (`gRPC, HTTP, coordinator`; 0 = any), fetch the model, lay out a run folder.
    `own`: overrides of the workers of one kind.

    Nothing is spawned yet except the model fetch. Raises ConfigError, StartError.
    """
    base = read_base(config)
    kind = engine_kind(engine, base)
    if kind == "mock" and model is not None:
        raise ConfigError(f"--model {model}: the mock engine has no weights; leave --model out")
    options = ClusterOptions(context, generation, unsplit, kind, Path("unknown"), None, base, own or {})
    options.validate()
    grpc, http, coordinator = ports
    chosen = choose_ports(len(options.workers), grpc=grpc, http=http, coordinator=coordinator)
    section = cast("dict[str, Any]", base.get("model", {}))
    path = None
    if kind == "torch":
        path = await fetch_model(model or section.get("path") or "default")
    name = section.get("name")
    options = ClusterOptions(context, generation, unsplit, kind, path, name, base, own or {})
    run = await asyncio.to_thread(create_run, log_dir)
    return LocalCluster(options, chosen, run, report=report)
