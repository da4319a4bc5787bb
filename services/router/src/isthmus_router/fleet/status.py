"""What a child tells its parent, over a pipe, a line at a time. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from isthmus_core.errors import InternalError

# A dead child is started again after this long, doubled with each death in a row.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
# After so many the fleet gives up: something is wrong that a start does not mend.
MOST_DEATHS = 10
# A child that has lived this long has proven itself: its next death is the first one.
STABLE_S = 60.0


@dataclass(frozen=True, slots=True)
class Status:
    """`missing`: what keeps the child from serving, empty when it serves. `running`: requests. `metrics_port`: where
    its own /metrics is, on the loopback."""

    missing: tuple[str, ...]
    running: int = 0
    metrics_port: int | None = None

    def line(self) -> bytes:
        """As it goes through the pipe."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Status:
        """Raises InternalError for anything else than a child's line."""
        try:
            raw = cast("dict[str, Any]", json.loads(line))
            return cls(tuple(raw["missing"]), int(raw["running"]), raw["metrics_port"])
        except (ValueError, KeyError, TypeError) as error:
            raise InternalError(f"a child said {line[:80]!r}: {error!r}") from error


def restart_pause_s(deaths: int) -> float | None:
    """Seconds until a child that died `deaths` times in a row is started again; None: not any more."""
    if deaths > MOST_DEATHS:
        return None
    return min(FIRST_PAUSE_S * 2.0 ** (deaths - 1), LONGEST_PAUSE_S)


def health(children: Sequence[tuple[str, Status | None]], *, draining: bool) -> tuple[int, dict[str, Any]]:
    """(HTTP status, body) of the fleet: 200 while at least one child serves. A child without a status has none yet, or
    is dead."""
    rows = {
        name: {"status": "starting"}
        if status is None
        else {"status": "unavailable" if status.missing else "ok", "running": status.running, "missing": status.missing}
        for name, status in children
    }
    serving = not draining and any(status is not None and not status.missing for _, status in children)
    state = "draining" if draining else "ok" if serving else "unavailable"
    return 200 if serving else 503, {"status": state, "processes": rows}
