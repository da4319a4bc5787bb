"""What one watcher of the cluster has not been told yet. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus_coordinator.cluster import Cluster, MemberView
from isthmus_coordinator.membership import Role
from isthmus_coordinator.placement import Served


@dataclass(frozen=True, slots=True)
class News:
    """Changes since the last ones. Members are named by the token of their stream, which is not used again. `ready`:
    context instances by generation instance. `served` None: as before."""

    complete: bool
    members: tuple[tuple[int, MemberView], ...]
    left: tuple[int, ...]
    ready: tuple[tuple[int, tuple[int, ...]], ...]
    served: tuple[Served, ...] | None


@dataclass(slots=True)
class Watch:
    """One watcher."""

    _version: int = -1
    _told: set[int] = field(default_factory=set[int])
    _ready: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    _served: tuple[Served, ...] | None = None

    def news(self, cluster: Cluster) -> News | None:
        """What has changed; None when nothing has."""
        first, since = self._version < 0, self._version
        if since == cluster.version:
            return None
        self._version = cluster.version
        members = {member.token: member for member in cluster.all_members()}
        left = tuple(sorted(self._told - members.keys()))
        changed = tuple(
            (token, cluster.member_view(member))
            for token, member in members.items()
            if member.changed_at > since or token not in self._told
        )
        ready: list[tuple[int, tuple[int, ...]]] = []
        for token, member in members.items():
            if member.pairs_changed_at > since or first:
                generation = member.role is Role.GENERATION
                now = tuple(one.token for one in cluster.ready_contexts(member)) if generation else ()
                if now != self._ready.get(token, ()):
                    self._ready[token] = now
                    ready.append((token, now))
        for token in left:
            self._ready.pop(token, None)
        self._told = set(members)
        served = cluster.served()
        news = News(first, changed, left, tuple(ready), None if served == self._served else served)
        self._served = served
        return news if first or changed or left or ready or news.served is not None else None
