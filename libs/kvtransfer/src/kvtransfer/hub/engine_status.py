"""What a hub asks the engine for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The engine's part of ListSessions: pages that nobody holds, all pages, requests running or queued."""

    free_pages: int
    total_pages: int
    open_requests: int
