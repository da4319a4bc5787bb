"""`isthmus top`: the cluster as it is now, and what changed since the last look. Pure but for the two questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.v1 import coordinator_service_pb2, kv_transfer_service_pb2
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from isthmus_client.client import get_cluster
from isthmus_client.show import role_name
from isthmus_client.transfer import list_sessions, seconds
from isthmus_core.config import TlsConfig
from isthmus_core.errors import IsthmusError

_HUB_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment (seconds of a monotonic clock). `sessions` by instance id; absent: no answer."""

    at: float
    cluster: coordinator_service_pb2.GetClusterResponse
    sessions: dict[str, kv_transfer_service_pb2.ListSessionsResponse] = field(
        default_factory=dict[str, kv_transfer_service_pb2.ListSessionsResponse]
    )


async def look(coordinator: str, tls: TlsConfig | None) -> Look:
    """Asks the coordinator, then every instance for its hand-offs. Raises IsthmusError when the former is silent."""
    cluster = await get_cluster(coordinator, tls=tls)
    members = [member.instance for member in cluster.members]

    async def ask(endpoint: str) -> kv_transfer_service_pb2.ListSessionsResponse | None:
        try:
            return await list_sessions(endpoint, tls=tls, timeout_s=_HUB_TIMEOUT_S)
        except IsthmusError:
            return None  # the row says so

    answers = await asyncio.gather(*(ask(one.endpoint) for one in members))
    sessions = {one.instance_id: answer for one, answer in zip(members, answers, strict=True) if answer is not None}
    return Look(asyncio.get_running_loop().time(), cluster, sessions)


def rates(before: Look | None, now: Look) -> dict[str, float]:
    """Finished requests a second by instance id, from the coordinator's counts; empty at the first look."""
    if before is None or now.at <= before.at:
        return {}
    earlier = {one.instance.instance_id: one.finished_requests for one in before.cluster.members}
    return {
        one.instance.instance_id: max(0, one.finished_requests - earlier[one.instance.instance_id])
        / (now.at - before.at)
        for one in now.cluster.members
        if one.instance.instance_id in earlier
    }


def render_top(before: Look | None, now: Look) -> Group:
    """The screen."""
    cluster = now.cluster
    ready = sum(pair.state == coordinator_service_pb2.PAIR_STATE_READY for pair in cluster.pairs)
    open_handoffs = sum(len(one.sessions) for one in now.sessions.values())
    head = (
        f"{len(cluster.members)} instances, {ready} of {len(cluster.pairs)} pairs ready, "
        f"{cluster.open_requests} open requests, {open_handoffs} open hand-offs"
    )
    table = Table(show_edge=False, expand=False)
    for name in ("instance", "role", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("running", "waiting", "held", "req/s"):
        table.add_column(name, justify="right")
    table.add_column("KV", min_width=20)
    for name in ("hand-offs", "in doubt"):
        table.add_column(name, justify="right")
    finished = rates(before, now)
    for member in sorted(cluster.members, key=lambda one: (one.instance.role, one.instance.instance_id)):
        table.add_row(*_row(member, now, finished))
    return Group(Text(head, style="bold"), Text(), table, *_oldest(now))


def _row(
    member: coordinator_service_pb2.ClusterMember, now: Look, finished: dict[str, float]
) -> list[str | ProgressBar]:
    load, name = member.load, member.instance.instance_id
    total = load.total_blocks or member.instance.total_blocks
    seen = now.sessions.get(name)
    state = "draining" if member.draining else "no answer" if seen is None else "ok"
    if member.changing_to:
        state = f"becomes {role_name(member.changing_to)}"
    counts = (str(load.running_requests), str(load.waiting_requests), str(load.held_handoffs))
    rate = f"{finished[name]:.1f}" if name in finished else ""
    bar = ProgressBar(total=max(total, 1), completed=load.used_blocks, width=20)
    doubt = str(load.in_doubt_blocks) if load.in_doubt_blocks else ""
    handoffs = "" if seen is None else str(len(seen.sessions))
    return [name, role_name(member.instance.role), state, *counts, rate, bar, handoffs, doubt]


def _oldest(now: Look, count: int = 5) -> Sequence[Text | Table]:
    """The hand-offs that are open for the longest time: those are the ones to worry about."""
    entries = [(seconds(one.age), name, one) for name, answer in now.sessions.items() for one in answer.sessions]
    entries.sort(key=lambda entry: -entry[0])
    if not entries:
        return []
    table = Table(title="longest open hand-offs", title_justify="left", show_edge=False)
    for name in ("request", "at", "with", "state", "pages", "for"):
        table.add_column(name)
    for age, name, one in entries[:count]:
        table.add_row(str(one.key.request_id), name, one.peer_instance_id, one.state, str(one.pages), f"{age:.1f} s")
    return [Text(), table]
