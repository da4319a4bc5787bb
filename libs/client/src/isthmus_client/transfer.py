"""Questions to the hubs of workers about the way of KV caches: who holds what, would a pair work, how fast is it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from isthmus.v1 import (
    kv_transfer_service_pb2,
    kv_transfer_service_pb2_grpc,
    transfer_terms_pb2,
    transfer_tools_pb2,
)
from rich.console import Group
from rich.table import Table
from rich.text import Text

from isthmus_client.show import role_name
from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel

KEY_LIMIT = 200


@asynccontextmanager
async def _hub(
    endpoint: str, tls: TlsConfig | None
) -> AsyncGenerator[kv_transfer_service_pb2_grpc.KvTransferServiceStub]:
    channel = open_channel(endpoint, tls)
    try:
        yield kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        await channel.close()


async def probe_pair(
    context: str, generation_id: str = "", nbytes: int = 0, *, tls: TlsConfig | None = None, timeout_s: float = 40.0
) -> transfer_tools_pb2.ProbeResponse:
    """Measures the way from the context instance at `context` (host:port) to a generation instance that it has a stream
    with, by real bytes. `generation_id` may be empty when there is one; `nbytes` 0 = as much as is possible. Raises
    IsthmusError."""
    async with _hub(context, tls) as stub:
        request = transfer_tools_pb2.ProbeRequest(instance_id=generation_id, bytes=nbytes)
        return await stub.Probe(request, timeout=timeout_s)


async def plan_pair(
    endpoint: str, peer: str, prompt_tokens: int = 1024, *, tls: TlsConfig | None = None, timeout_s: float = 30.0
) -> transfer_tools_pb2.PlanTransferResponse:
    """What a hand-off between the instances at two addresses would be; nothing is carried out. Raises IsthmusError."""
    async with _hub(endpoint, tls) as stub:
        request = transfer_tools_pb2.PlanTransferRequest(endpoint=peer, prompt_tokens=prompt_tokens)
        return await stub.PlanTransfer(request, timeout=timeout_s)


async def list_sessions(
    endpoint: str, *, tls: TlsConfig | None = None, timeout_s: float = 10.0
) -> kv_transfer_service_pb2.ListSessionsResponse:
    """Who holds which pages of the instance at `endpoint`, and the terms with each peer. Raises IsthmusError."""
    async with _hub(endpoint, tls) as stub:
        return await stub.ListSessions(kv_transfer_service_pb2.ListSessionsRequest(), timeout=timeout_s)


def render_probe(answer: transfer_tools_pb2.ProbeResponse) -> Group:
    """One line for each pair of ranks."""
    table = _table(f"{answer.context_id} -> {answer.generation_id}")
    for name in ("ranks", "path", "GB/s", "first", "next", "per run", "problem"):
        table.add_column(name, no_wrap=name != "problem")
    for one in answer.pairs:
        ranks = f"{one.src_rank} -> {one.dst_rank}"
        if one.problem:
            table.add_row(ranks, "", "", "", "", "", one.problem)
            continue
        rate = one.bytes / max(seconds(one.transfer), 1e-9) / 1e9
        times = (_time(one.first), _time(one.next), _time(one.per_run))
        table.add_row(ranks, one.path, f"{rate:.2f}", *times, "")
    return Group(table)


def render_plan(answer: transfer_tools_pb2.PlanTransferResponse) -> Group:
    """The explanation, and times where the pair has been measured."""
    parts: list[Text | Table] = [Text(answer.explanation)]
    if any(write.path for write in answer.writes):
        table = _table("by the last probe")
        for name in ("ranks", "path", "bytes", "runs", "expected"):
            table.add_column(name)
        for write in answer.writes:
            expected = _time(write.expected) if write.HasField("expected") else "not measured"
            ranks = f"{write.src_rank} -> {write.dst_rank}"
            table.add_row(ranks, write.path, f"{write.bytes:,}", f"{write.fragments:,}", expected)
        parts.append(table)
    return Group(*parts)


def render_sessions(answer: kv_transfer_service_pb2.ListSessionsResponse) -> Group:
    """Sessions, and the terms with every peer."""
    pages = f"{answer.free_pages} of {answer.total_pages} pages free, {answer.open_requests} requests"
    leaked = f", {answer.leaked_bytes:,} bytes leaked" if answer.leaked_bytes else ""
    sessions = _table(pages + leaked)
    for name in ("request", "attempt", "side", "state", "pages", "in doubt", "peer", "for"):
        sessions.add_column(name)
    for one in answer.sessions[:KEY_LIMIT]:
        side = role_name(one.side)
        doubt = "yes" if one.in_doubt else ""
        where = (str(one.key.request_id), str(one.key.attempt), side, one.state)
        sessions.add_row(*where, str(one.pages), doubt, one.peer_instance_id, _time(one.age))
    peers = _table("streams")
    for name in ("peer", "protocol", "capabilities", "open requests", "blocks a request"):
        peers.add_column(name)
    for peer in answer.peers:
        names = [transfer_terms_pb2.Capability.Name(one).removeprefix("CAPABILITY_") for one in peer.capabilities]
        limits = (str(peer.limits.max_open_requests), str(peer.limits.max_block_ids))
        peers.add_row(peer.instance_id, str(peer.protocol_version), ", ".join(names).lower(), *limits)
    more = len(answer.sessions) - KEY_LIMIT
    tail = [Text(f"and {more} more sessions")] if more > 0 else []
    return Group(sessions, *tail, peers)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", show_edge=False)


def seconds(value: Duration) -> float:
    """A duration of the schema."""
    return value.seconds + value.nanos / 1e9


def _time(value: Duration) -> str:
    time = seconds(value)
    if time < 1e-3:
        return f"{time * 1e6:.1f} us"
    return f"{time * 1e3:.2f} ms" if time < 1 else f"{time:.1f} s"
