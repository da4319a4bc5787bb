"""Build hook: generates the Python stubs before the wheel is put together (see generate.py)."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class GenerateStubs(BuildHookInterface[Any]):
    """Runs `generate.generate`. The build front end does not put this folder on sys.path, hence runpy."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        root = Path(self.root)
        runpy.run_path(str(root / "generate.py"))["generate"](root)
