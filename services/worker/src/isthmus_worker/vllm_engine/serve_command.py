"""`engine.serve`: the command of a plain `vllm serve` with what the worker adds to it. Pure.

engine.serve                   [.venv-vllm/bin/vllm, serve, --port, "7201"]
what is started                .venv-vllm/bin/vllm serve MODEL --port 7201 --dtype float32 --kv-transfer-config {…} …
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from isthmus_core.errors import ConfigError
from isthmus_worker.vllm_engine.arguments import engine_arguments, set_elsewhere

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.vllm_engine.model import ModelIdentity

# For the library only: a server keeps its tokenizer, and counts for its own /metrics.
_NOT_FLAGS = ("model", "skip_tokenizer_init", "disable_log_stats")
# Tokens in, tokens out; how many were cached; and no line in the log for every look at the load.
_ALSO = (
    "--enable-scale-out",
    "--enable-prompt-tokens-details",
    "--disable-access-log-for-endpoints=/health,/metrics",
)
_ANYWHERE = ("0.0.0.0", "::", "")


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """`url`: where the server will answer; `api_key`: what it asks for, or empty."""

    model: Path
    argv: tuple[str, ...]
    url: str
    api_key: str


def serve_command(config: IsthmusConfig, identity: ModelIdentity, events_endpoint: str) -> ServeCommand:
    """Raises ConfigError for a command that can not be completed."""
    given = config.engine.serve
    if "serve" not in given:
        raise ConfigError(f'engine.serve = {given}: begin with vllm, serve, for example [vllm, serve, --port, "7201"]')
    if config.model.dtype == "auto":
        raise ConfigError("model.dtype = auto: with engine.serve write float32, bfloat16 or float16")
    port = _value(given, "--port")
    if not port.isdigit():
        raise ConfigError(f'engine.serve = {given}: name the port of the server, for example --port, "7201"')
    names = [one.split("=")[0].removeprefix("--no-").removeprefix("--") for one in given if one.startswith("--")]
    for name in names:
        if (key := set_elsewhere(name.replace("-", "_"))) is not None:
            raise ConfigError(f"engine.serve: --{name}: set {key} instead")
    arguments = engine_arguments(config, identity, events_endpoint)
    if twice := sorted(name for name in names if name.replace("-", "_") in config.engine.vllm):
        raise ConfigError(f"engine.serve: --{twice[0]}: is in engine.vllm too")
    after = list(given).index("serve") + 1
    flags = [word for name, value in arguments.items() if name not in _NOT_FLAGS for word in _flag(name, value)]
    if identity.adapters:
        flags += ["--lora-modules", *(f"{one.name}={one.path}" for one in identity.adapters)]
    host = _value(given, "--host")
    return ServeCommand(
        Path(arguments["model"]),
        (*given[:after], str(arguments["model"]), *_ALSO, *given[after:], *flags),
        f"http://{'127.0.0.1' if host in _ANYWHERE else host}:{port}",
        _value(given, "--api-key"),
    )


def _value(command: Sequence[str], flag: str) -> str:
    """Of the last `--flag VALUE` or `--flag=VALUE`; empty without."""
    found = ""
    for number, word in enumerate(command):
        if word == flag:
            found = command[number + 1] if number + 1 < len(command) else ""
        elif word.startswith(f"{flag}="):
            found = word.split("=", 1)[1]
    return found


def _flag(name: str, value: Any) -> list[str]:
    """An argument of AsyncEngineArgs as vLLM's command line has it."""
    flag = f"--{name.replace('_', '-')}"
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            return [f"--no-{name.replace('_', '-')}"]
        case dict():
            return [flag, json.dumps(value)]
        case list():
            return [flag, *(str(one) for one in cast("list[Any]", value))]
        case _:
            return [flag, str(value)]
