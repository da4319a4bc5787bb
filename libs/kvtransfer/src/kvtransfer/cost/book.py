"""The costs of every path of a rank: what was measured, corrected by what transfers took, kept on disk.

probe ─▶ PathCost ── observed transfers ─▶ a factor for direct and one for bounced ─▶ PathCost as decisions use it
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.cost.model import PathCost

if TYPE_CHECKING:
    from kvtransfer.probe_ports import PairProbe

log = logging.getLogger(__name__)

# Before anything was measured. Host: over the kernel or tcp on one machine; device: over NVLink.
HOST = PathCost(2e-4, 6e-6, 1.5e9, 3e9, 3e9, 1e-8, 1e-4, 1e-3, overlaps=False)
DEVICE = PathCost(5e-5, 9e-6, 270e9, 1.6e12, 1.4e12, 1e-10, 6e-5, 1e-3, overlaps=True)
# How much one observation counts, and how far a factor may go.
_WEIGHT = 0.2
_LEAST, _MOST = 0.1, 10.0
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Copying:
    """What this rank's copies take: bytes per second of a gather and of a scatter, seconds for every fragment."""

    gather_rate: float
    scatter_rate: float
    fragment_s: float


@dataclass(slots=True)
class _Path:
    cost: PathCost
    direct: float = 1.0
    bounced: float = 1.0


class CostBook:
    """Not thread-safe. `file`: where the paths are kept, None for nowhere; one that can not be read is made anew."""

    def __init__(self, start: PathCost, file: Path | None = None) -> None:
        self._start, self._file = start, file
        self._paths: dict[str, _Path] = {} if file is None else _load(file)

    def copying(self, measured: Copying) -> None:
        """This rank's copies were measured: they hold for every path that begins here."""
        self._start = _with_copies(self._start, measured)
        for path in self._paths.values():
            path.cost = _with_copies(path.cost, measured)

    def probed(self, probe: PairProbe) -> None:
        """The way to a peer was measured."""
        if probe.problem or not probe.path or probe.transfer <= 0:
            return
        rate = probe.bytes / max(probe.transfer - probe.next, probe.transfer / 10)
        known = self._paths.get(probe.path)
        cost = replace(
            self._start if known is None else known.cost,
            write_s=max(probe.next, 1e-7),
            post_s=max(probe.per_run, 1e-8),
            rate=rate,
        )
        self._paths[probe.path] = _Path(cost)
        self._save()

    def knows(self, path: str) -> bool:
        """True when the path was measured."""
        return path in self._paths

    def cost(self, path: str) -> PathCost:
        """What decisions about the path use."""
        known = self._paths.get(path)
        if known is None:
            return self._start
        cost = known.cost
        return replace(
            cost,
            post_s=cost.post_s * known.direct,
            chunk_s=cost.chunk_s * known.bounced,
            gather_rate=cost.gather_rate / known.bounced,
            scatter_rate=cost.scatter_rate / known.bounced,
        )

    def observed(self, path: str, *, bounced: bool, predicted: float, took: float) -> None:
        """A transfer that had the agent for itself took `took` seconds until its writer was done."""
        if predicted <= 0 or took <= 0:
            return
        known = self._paths.setdefault(path, _Path(self._start))
        factor = known.bounced if bounced else known.direct
        factor = min(_MOST, max(_LEAST, factor * (1 + _WEIGHT * (took / predicted - 1))))
        if bounced:
            known.bounced = factor
        else:
            known.direct = factor

    def _save(self) -> None:
        """A cost that can not be kept is measured again next time."""
        if self._file is None:
            return
        paths = {name: asdict(path.cost) for name, path in self._paths.items()}
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": _VERSION, "paths": paths}, indent=1))
            temporary.replace(self._file)
        except OSError as error:
            log.warning("the costs of paths can not be kept in %s: %s", self._file, error)


def _with_copies(cost: PathCost, measured: Copying) -> PathCost:
    return replace(
        cost,
        gather_rate=measured.gather_rate,
        scatter_rate=measured.scatter_rate,
        fragment_s=measured.fragment_s,
    )


def _load(file: Path) -> dict[str, _Path]:
    try:
        data = json.loads(file.read_text())
        if data["version"] != _VERSION:
            return {}
        return {str(name): _Path(PathCost(**cost)) for name, cost in data["paths"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the costs of paths in %s can not be used and are measured again: %s", file, error)
        return {}
