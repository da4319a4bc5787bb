"""The costs of every path of a rank: what was measured, corrected by what transfers took, kept on disk.

probe ─▶ PathCost ── transfers ─▶ factors of descriptors, bytes and copies, a credit, a chunk ─▶ PathCost of decisions
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.cost.model import PathCost, bounced, direct_s, gather_s

if TYPE_CHECKING:
    from kvtransfer.cost.model import Shape
    from kvtransfer.probe_ports import PairProbe

log = logging.getLogger(__name__)

# Before anything was measured. Host: over the kernel or tcp on one machine; device: over NVLink.
HOST = PathCost(2e-4, 6e-6, 1.5e9, 3e9, 3e9, 1e-8, 1e-4, 1e-3, overlaps=False)
DEVICE = PathCost(5e-5, 9e-6, 270e9, 1.6e12, 1.4e12, 1e-10, 2e-4, 1e-3, overlaps=True)
# How much one observation counts, and how far a factor may go.
_WEIGHT = 0.2
_LEAST, _MOST = 0.1, 30.0
# How many times longer than expected a direct write can have been for the books.
_BELIEVED = 3.0
_LEAST_CHUNK = 0.5
# What a stage takes at least, for ratios.
_SHORTEST_S = 1e-6
_VERSION = 1
_FIRST_KEPT = 4


@dataclass(frozen=True, slots=True)
class Copying:
    """What this rank's copies take: bytes per second of a gather and of a scatter, seconds for every fragment."""

    gather_rate: float
    scatter_rate: float
    fragment_s: float


@dataclass(frozen=True, slots=True)
class Staged:
    """A transfer in chunks: seconds until the writer was done, of all gathers, and from asking for room for the first
    chunk until it had it."""

    took: float
    gather: float
    credit: float
    chunk_bytes: int
    chunks: int
    depth: int = 4


@dataclass(slots=True)
class _Path:
    """What was measured, and what transfers say about it: factors of the cost of a write, of descriptors, of bytes, of
    copies, of a credit and of a chunk. `seen`: transfers in chunks; `direct`: others."""

    cost: PathCost
    write: float = 1.0
    post: float = 1.0
    slow: float = 1.0
    copies: float = 1.0
    credit: float = 1.0
    chunk: float = 1.0
    seen: int = 0
    direct: int = 0


class CostBook:
    """Not thread-safe. `file`: where the paths are kept as transfers have corrected them, None for nowhere; one that
    can not be read is made anew."""

    def __init__(self, start: PathCost, file: Path | None = None) -> None:
        self._start, self._file = start, file
        self._paths: dict[str, _Path] = {} if file is None else _load(file)

    def copying(self, measured: Copying) -> None:
        """This rank's copies were measured: they hold for every path that transfers have not corrected already."""
        self._start = replace(
            self._start,
            gather_rate=measured.gather_rate,
            scatter_rate=measured.scatter_rate,
            fragment_s=measured.fragment_s,
        )

    def probed(self, probe: PairProbe) -> None:
        """The way to a peer was measured."""
        if probe.problem or not probe.path or probe.transfer <= 0:
            return
        rate = probe.bytes / max(probe.transfer - probe.next, probe.transfer / 10)
        known = self._paths.get(probe.path)
        cost = replace(
            self._start if known is None else known.cost,
            # A bare write was measured; one of a hand-off is put together first, and looked at now and then.
            write_s=max(probe.next, self._start.write_s),
            post_s=max(probe.per_run, 1e-8),
            rate=rate,
        )
        path = self._paths.setdefault(probe.path, _Path(cost))
        # What chunks have taught is not measured here, and stays.
        path.cost, path.write, path.post, path.slow, path.direct = cost, 1.0, 1.0, 1.0, 0
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
            write_s=cost.write_s * known.write,
            post_s=cost.post_s * known.post,
            rate=cost.rate / known.slow,
            gather_rate=cost.gather_rate / known.copies,
            scatter_rate=cost.scatter_rate / known.copies,
            fragment_s=cost.fragment_s * known.copies,
            credit_s=cost.credit_s * known.credit,
            chunk_s=cost.chunk_s * known.chunk,
        )

    def wrote(self, path: str, shape: Shape, took: float) -> None:
        """A direct write that had the agent for itself took `took` seconds. What it says is shared between the write,
        its bytes and its descriptors as the prediction is: what many small ones say is little about a large one. The
        first ones count more, by half at most, and none as more than a few times as long: were one that lost its
        processor believed, nothing would be written directly any more that could correct it."""
        cost, known = self.cost(path), self._known(path)
        predicted = direct_s(cost, shape)
        if predicted <= 0 or took <= 0:
            return
        ratio, weight = min(took / predicted, _BELIEVED), max(_WEIGHT, 1 / (2 + known.direct)) / predicted
        known.write = _moved(known.write, ratio, weight * cost.write_s)
        known.post = _moved(known.post, ratio, weight * shape.descriptors * cost.post_s)
        known.slow = _moved(known.slow, ratio, weight * shape.nbytes / cost.rate)
        known.direct += 1
        self._learnt(known)

    def staged(self, path: str, shape: Shape, seen: Staged) -> None:
        """A transfer in chunks that had the agent for itself is over on this side. The first ones count most: copies
        were measured in memory that was in the processor's caches. Means are geometric, since a processor that was
        taken away makes one of them hundreds of times longer."""
        cost, known = self.cost(path), self._known(path)
        expected = gather_s(cost, shape.nbytes, shape.fragments)
        if expected <= 0 or seen.took <= 0 or seen.gather <= 0:
            return
        weight = max(_WEIGHT, 1 / (1 + known.seen))
        known.seen += 1
        known.copies = _moved(known.copies, seen.gather / expected, weight)
        known.credit = _moved(known.credit, max(seen.credit, _SHORTEST_S) / cost.credit_s, weight)
        rest = seen.took - bounced(self.cost(path), shape, seen.chunk_bytes, seen.depth).writer_s
        chunk_s = max(cost.chunk_s + rest / seen.chunks, _SHORTEST_S)
        # What hides behind slow bytes is there again when they are few.
        known.chunk = max(_LEAST_CHUNK, _moved(known.chunk, chunk_s / cost.chunk_s, weight))
        self._learnt(known)

    def _learnt(self, path: _Path) -> None:
        """Keeps what is known after 4, 8, 16, … transfers: later ones change it less and less."""
        count = path.seen + path.direct
        if count >= _FIRST_KEPT and count & (count - 1) == 0:
            self._save()

    def _known(self, path: str) -> _Path:
        return self._paths.setdefault(path, _Path(self._start))

    def _save(self) -> None:
        """A cost that can not be kept is measured again next time."""
        if self._file is None:
            return
        paths = {name: asdict(self.cost(name)) for name in self._paths}
        temporary = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps({"version": _VERSION, "paths": paths}, indent=1))
            temporary.replace(self._file)
        except OSError as error:
            log.warning("the costs of paths can not be kept in %s: %s", self._file, error)


def _moved(factor: float, ratio: float, weight: float) -> float:
    return min(_MOST, max(_LEAST, factor * ratio**weight))


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
