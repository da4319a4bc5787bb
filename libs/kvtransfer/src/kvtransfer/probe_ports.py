"""What hub and rank say to each other about measuring a pair."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairProbe:
    """What real bytes from one context rank to one generation rank took. Durations in seconds.

    first, next    one small write, and the median of those after it
    transfer       one write of `bytes`
    per_run        what each further run adds to a write of many small runs
    network_bytes  what the network interfaces of the writer's host sent meanwhile, traffic of others included
    problem        why there is no measurement; "" when there is one
    """

    src_rank: int
    dst_rank: int
    path: str = ""
    bytes: int = 0
    first: float = 0.0
    next: float = 0.0
    transfer: float = 0.0
    per_run: float = 0.0
    network_bytes: int = 0
    problem: str = ""

    def expected(self, nbytes: int, fragments: int) -> float | None:
        """Seconds that a write of `nbytes` in `fragments` runs takes by this measurement; None when there is none."""
        if self.problem or not self.bytes:
            return None
        return self.next + nbytes * self.transfer / self.bytes + max(0, fragments - 1) * self.per_run


@dataclass(frozen=True, slots=True)
class ProbePeer:
    """Measure the way to every rank of a loaded peer that this rank writes to. Answered by `PeerProbed`.

    `nbytes` of the large write; 0 = what the scratch memory holds.
    """

    number: int
    instance_id: str
    incarnation: bytes
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class PeerProbed:
    """Answer to the `ProbePeer` of that number."""

    number: int
    pairs: tuple[PairProbe, ...]


def path_matches(path: str, wanted: str) -> bool:
    """True when the words of `wanted` stand in the name of the path, side by side. What a path says in parentheses
    does not count."""
    return f" {wanted.strip()} " in f" {path.split(' (', maxsplit=1)[0]} "
