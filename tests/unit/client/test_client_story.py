"""`isthmus trace`: the legs of one request on one axis; `isthmus top`; `isthmus config`."""

from __future__ import annotations

import json
from pathlib import Path

from isthmus.v1 import common_pb2, coordinator_service_pb2, kv_transfer_service_pb2, timeline_pb2, worker_service_pb2
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from isthmus_client import cli
from isthmus_client.live import Look, render_top
from isthmus_client.story import render_story

MS = 1_000_000


def _text(what: RenderableType, width: int = 120) -> str:
    console = Console(record=True, width=width)
    console.print(what)
    return console.export_text()


def _entry(kind: str, begin_ms: int, ms: int, **more: object) -> timeline_pb2.TimelineEntry:
    number = timeline_pb2.TimelineKind.Value(f"TIMELINE_KIND_{kind}")
    return timeline_pb2.TimelineEntry(kind=number, begin_unix_ns=begin_ms * MS, duration_ns=ms * MS, **more)  # type: ignore[arg-type]


def test_a_request_is_drawn_in_order_and_to_scale():
    key = common_pb2.RequestKey(request_id=77, attempt=0)
    context = timeline_pb2.LegTimeline(
        key=key, leg="context", instance_id="c0", begin_unix_ns=1000 * MS, end_unix_ns=1100 * MS
    )
    context.outcome, context.prompt_tokens, context.cached_tokens = "ok", 64, 16
    context.entries.append(_entry("PREFILL_CHUNK", 1000, 50, token_begin=16, token_end=64))
    context.entries.append(_entry("TRANSFER", 1050, 25, bytes=2 << 20, path="nixl/ucx tcp", outcome="delivered"))
    generation = timeline_pb2.LegTimeline(key=key, leg="generation", instance_id="g0", begin_unix_ns=1050 * MS)
    generation.entries.append(_entry("RECEIVE", 1050, 25, outcome="timed_out", reason="no word from c0"))
    text = _text(render_story([context, generation], 100))
    assert text.startswith("request 77, 100.0 ms")
    assert text.index("context at c0 (attempt 0, 64 tokens, 16 cached): ok") < text.index("generation at g0")
    lines = {line.split("  ")[1].strip(): line for line in text.splitlines() if "█" in line}
    bars = {name: (line.index("█"), line.count("█")) for name, line in lines.items()}
    assert bars["prefill [16, 64)"][1] == 2 * bars["write 0 -> 0"][1], "50 ms and 25 ms"
    assert bars["write 0 -> 0"][0] == bars["receive"][0] > bars["prefill [16, 64)"][0]
    assert "2.0 MiB nixl/ucx tcp" in lines["write 0 -> 0"]
    assert "delivered" not in lines["write 0 -> 0"], "what is as it should be needs no word"
    assert "timed_out no word from c0" in lines["receive"]


def test_top_shows_what_to_worry_about():
    cluster = coordinator_service_pb2.GetClusterResponse(open_requests=3)
    for name, draining in (("c0", True), ("g0", False)):
        instance = coordinator_service_pb2.InstanceDescriptor(instance_id=name, total_blocks=10)
        load = worker_service_pb2.InstanceLoad(used_blocks=5, total_blocks=10, running_requests=2, in_doubt_blocks=4)
        cluster.members.append(coordinator_service_pb2.ClusterMember(instance=instance, load=load, draining=draining))
    sessions = kv_transfer_service_pb2.ListSessionsResponse()
    for number, age in ((1, 2), (2, 40)):
        one = sessions.sessions.add(state="exposed", pages=3, peer_instance_id="c0")
        one.key.request_id, one.age.seconds = number, age
    text = _text(render_top(None, Look(0.0, cluster, {"g0": sessions})))
    assert "2 instances, 0 of 0 pairs ready, 3 open requests, 2 open hand-offs" in text
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()}
    assert "draining" in rows["c0"]
    assert text.index("40.0 s") < text.index("2.0 s"), "the oldest first"


def test_config_says_where_a_value_comes_from(tmp_path: Path):
    file = tmp_path / "isthmus.yaml"
    file.write_text("engine:\n  kind: mock\n  mock: {decode_us: 5}\n")
    arguments = ["config", "explain", str(file), "--set", "router.drain_s=3", "--json"]
    rows = {row["key"]: row for row in json.loads(CliRunner().invoke(cli.app, arguments).output)}
    assert (rows["engine.mock.decode_us"]["value"], rows["engine.mock.decode_us"]["source"]) == ("5.0", "file")
    assert (rows["router.drain_s"]["value"], rows["router.drain_s"]["source"]) == ("3.0", "--set")
    assert rows["engine.max_running"]["source"] == "default"
    assert all(row["meaning"] for row in rows.values())
    file.write_text("engine: {kid: mock}\n")
    wrong = CliRunner().invoke(cli.app, ["config", "validate", str(file)])
    assert wrong.exit_code == 2
    assert "did you mean engine.kind?" in wrong.output
