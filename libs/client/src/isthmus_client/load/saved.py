"""A run of `isthmus bench` as a file: options, figures and every request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus_client.load.measure import Measured
from isthmus_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Run:
    """`options`: what was asked for; `summary`: as `summarise` makes it; `requests`: in the order they were planned."""

    options: Mapping[str, Any]
    summary: Mapping[str, Any]
    requests: list[Measured]

    def write(self, path: Path) -> None:
        """Raises ConfigError when the file can not be written."""
        whole = {"options": self.options, "summary": self.summary, "requests": [asdict(one) for one in self.requests]}
        try:
            path.write_text(json.dumps(whole) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: Path) -> Run:
        """What `write` wrote. Raises ConfigError."""
        try:
            whole: dict[str, Any] = json.loads(path.read_text())
            requests = [Measured(gaps=tuple(one.pop("gaps")), **one) for one in whole["requests"]]
            return cls(whole["options"], whole["summary"], requests)
        except OSError as error:
            raise ConfigError(f"--compare {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--compare {path}: not what --save writes") from error

    def series(self) -> dict[str, list[float]]:
        """What the page draws, in seconds: one value for each request that was answered; between tokens, one for each
        token."""
        good = [one for one in self.requests if not one.error]
        return {
            "TTFT": [one.first_token for one in good],
            "TPOT": [one.per_token for one in good if one.output_tokens > 1],
            "between tokens": [gap for one in good for gap in one.gaps],
            "whole answer": [one.total for one in good],
        }
