"""One request as the workers remember it: all its legs on one time axis, drawn with characters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import grpc.aio
from isthmus.v1 import timeline_pb2, worker_service_pb2_grpc
from rich.console import Group
from rich.text import Text

from isthmus_client.client import get_cluster
from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel

_TIMEOUT_S = 5.0
_NAMES = 26  # columns of the labels
_TAIL = 34  # and of the remarks
_STYLES = {"queue": "yellow", "prefill_chunk": "blue", "transfer": "green", "receive": "green", "decode": "magenta"}


async def request_story(coordinator: str, request_id: int, tls: TlsConfig | None) -> list[timeline_pb2.LegTimeline]:
    """Every leg of a request that a member of the cluster remembers, in order of time. Members that do not answer are
    left out when others know the request. Raises IsthmusError."""
    cluster = await get_cluster(coordinator, tls=tls)
    endpoints = [member.instance.endpoint for member in cluster.members]
    answers = await asyncio.gather(*(_legs(one, request_id, tls) for one in endpoints), return_exceptions=True)
    legs = [leg for answer in answers if not isinstance(answer, BaseException) for leg in answer]
    failures = [one for one in answers if isinstance(one, BaseException)]
    if failures and not legs:
        raise failures[0]
    return sorted(legs, key=lambda leg: leg.begin_unix_ns)


async def _legs(endpoint: str, request_id: int, tls: TlsConfig | None) -> Sequence[timeline_pb2.LegTimeline]:
    async with open_channel(endpoint, tls) as channel:
        stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
        try:
            answer = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(request_id=request_id), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
    return answer.legs


def render_story(legs: Sequence[timeline_pb2.LegTimeline], width: int = 100) -> Group:
    """Bars for what takes time, marks for moments. `width` in characters."""
    begin = min(leg.begin_unix_ns for leg in legs)
    end = max((last for leg in legs for last in _ends(leg)), default=begin)
    span = max(end - begin, 1)
    room = max(20, width - _NAMES - _TAIL)
    trace = next((leg.trace_id.hex() for leg in legs if leg.trace_id), "")
    head = f"request {legs[0].key.request_id}, {span / 1e6:.1f} ms" + (f", trace {trace}" if trace else "")
    lines: list[Text] = [Text(head, style="bold")]
    for leg in legs:
        lines += [Text(), Text(_title(leg), style="bold" if leg.outcome in ("", "ok") else "bold red")]
        lines += [_line(entry, begin, span, room) for entry in leg.entries]
        if leg.left_out:
            lines.append(Text(f"  and {leg.left_out} more"))
    return Group(*lines)


def _ends(leg: timeline_pb2.LegTimeline) -> Iterable[int]:
    yield leg.end_unix_ns or leg.begin_unix_ns
    for entry in leg.entries:
        yield entry.begin_unix_ns + entry.duration_ns


def _title(leg: timeline_pb2.LegTimeline) -> str:
    peer = f" with {leg.peer_instance_id}" if leg.peer_instance_id else ""
    cached = f", {leg.cached_tokens} cached" if leg.cached_tokens else ""
    words = f"{leg.leg} at {leg.instance_id}{peer} (attempt {leg.key.attempt}, {leg.prompt_tokens} tokens{cached})"
    outcome = leg.outcome or "running"
    return f"{words}: {outcome}" + (f", {leg.reason}" if leg.reason else "")


def _line(entry: timeline_pb2.TimelineEntry, begin: int, span: int, room: int) -> Text:
    kind = timeline_pb2.TimelineKind.Name(entry.kind).removeprefix("TIMELINE_KIND_").lower()
    at = min(room - 1, int((entry.begin_unix_ns - begin) * room / span))
    bar = "|" if entry.duration_ns == 0 else "█" * max(1, round(entry.duration_ns * room / span))
    line = Text(f"  {_label(kind, entry):<{_NAMES - 2}}")
    line.append(" " * max(0, at))
    line.append(bar[: max(1, room - at)], style=_STYLES.get(kind, "white"))
    line.append(" " * max(1, room - at - len(bar) + 1))
    line.append(_remark(entry))
    return line


def _label(kind: str, entry: timeline_pb2.TimelineEntry) -> str:
    match kind:
        case "prefill_chunk":
            return f"prefill [{entry.token_begin}, {entry.token_end})"
        case "transfer":
            return f"write {entry.src_rank} -> {entry.dst_rank}"
        case _:
            return kind.replace("_", " ")


def _remark(entry: timeline_pb2.TimelineEntry) -> str:
    words: list[str] = []
    if entry.duration_ns:
        words.append(f"{entry.duration_ns / 1e6:.2f} ms")
    if entry.bytes:
        words.append(f"{entry.bytes / 2**20:.1f} MiB")
    if entry.tokens:
        words.append(f"{entry.tokens} tokens")
    if entry.path:
        words.append(entry.path)
    if entry.outcome and entry.outcome not in ("ok", "delivered"):
        words.append(entry.outcome)
    if entry.reason:
        words.append(entry.reason)
    return " ".join(words)
