"""Keys of the section `engine` that only `engine.kind: vllm` uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pydantic import Field

VLLM_ARGUMENTS: dict[str, Any] = Field(
    default_factory=dict,
    description="engine.kind vllm: arguments of vLLM, named as in its AsyncEngineArgs, passed on untouched; sizes of "
    "cache, block and batch are among them",
)
VLLM_PYTHON = cast(
    "Path | None",
    Field(
        default=None,
        description="engine.kind vllm: interpreter of the environment that has vLLM; default: the worker's own",
    ),
)
VLLM_SERVE: list[str] = Field(
    default_factory=list,
    description="engine.kind vllm: command of a plain `vllm serve` that the worker runs and asks by HTTP, instead of "
    'vLLM as a library: [vllm, serve, --port, "7201"]; the model and what else the worker decides are added to it',
)
ADAPTERS: dict[str, Path] = Field(
    default_factory=dict,
    description="engine.kind vllm: folders of LoRA adapters by name; a request for model NAME:ADAPTER uses one. Both "
    "instances of a pair must have the same ones",
)
