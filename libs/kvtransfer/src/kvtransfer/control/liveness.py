"""Is anybody there? Silence makes a stream suspect and it is opened again; it never makes a peer dead."""

from __future__ import annotations

from enum import Enum

SILENT_PROBES = 3


class Probe(Enum):
    """What to do about a stream."""

    NOTHING = "nothing"
    PING = "ping"
    SUSPECT = "suspect"


class Liveness:
    """One stream. After `ping_s` quiet seconds it is probed; when `SILENT_PROBES` were not answered it is suspect."""

    def __init__(self, ping_s: float, now: float) -> None:
        self._ping_s, self._due, self._silent = ping_s, now + ping_s, 0

    def heard(self, now: float) -> None:
        """Anything came."""
        self._due, self._silent = now + self._ping_s, 0

    def tick(self, now: float) -> Probe:
        """What is due; asking again at the same time gives NOTHING."""
        if now < self._due:
            return Probe.NOTHING
        self._due = now + self._ping_s
        if self._silent >= SILENT_PROBES:
            return Probe.SUSPECT
        self._silent += 1
        return Probe.PING
