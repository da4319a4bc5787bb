"""Whether an environment can run vLLM as the engine.

    PYTHON -m isthmus_worker.vllm_engine.doctor

Prints one line of JSON, {"version": TEXT or null, "problems": [TEXT, …]}; exit code 0 when there is no problem.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec

from kvtransfer.integrations.vllm.refusals import installed_version, version_problem

# Found by libraries that then import them; the CPU wheel of torch comes without.
_HARMFUL = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True, slots=True)
class Facts:
    """What is installed. `command`: the distribution is called vllm, as vLLM's own command wants it."""

    version: str | None
    command: bool
    nixl: bool
    harmful: tuple[str, ...]


def problems(facts: Facts) -> list[str]:
    """What stands in the way, one line each with what to do."""
    found: list[str] = []
    if problem := version_problem(facts.version):
        found.append(f"{problem}: make setup-vllm")
    elif not facts.command:
        found.append("vLLM's own command does not find a distribution called vllm: make setup-vllm")
    if not facts.nixl:
        found.append("neither nixl-cu12 nor nixl-cu13 is installed beside vLLM: caches can not be handed off")
    if facts.version is not None and "+cpu" in facts.version and facts.harmful:
        found.append(f"pip uninstall {' '.join(facts.harmful)}: compiled for another torch, imported all the same")
    return found


def gather() -> Facts:
    """Of this environment; nothing is imported."""
    try:
        metadata.version("vllm")
        command = True
    except metadata.PackageNotFoundError:
        command = False
    nixl = any(find_spec(name) is not None for name in ("nixl_cu12", "nixl_cu13"))
    return Facts(installed_version(), command, nixl, tuple(name for name in _HARMFUL if find_spec(name) is not None))


def main() -> int:
    """The command; returns the exit code."""
    facts = gather()
    found = problems(facts)
    print(json.dumps({"version": facts.version, "problems": found}))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
