"""What operators see of a cluster: one trace per request, metrics of every process, log lines, the workers' record."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import AsyncGenerator
from dataclasses import replace

import grpc
import pytest
import pytest_asyncio
from isthmus.v1 import timeline_pb2, worker_service_pb2_grpc

from cluster import MOCK, assert_idle, running_cluster
from isthmus_client import Client
from isthmus_client.supervisor import LocalCluster
from isthmus_core.errors import IsthmusError
from isthmus_core.metrics.catalogue import CATALOGUE
from isthmus_core.rpc import open_channel
from mock_oracle import oracle
from otlp import OtlpReceiver, ReceivedSpan
from scrape import log_lines, scrape, scrape_text, total

pytestmark = [pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

CONTEXT, GENERATION = "context-0", "generation-0"


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="receiver")
async def _receiver() -> AsyncGenerator[OtlpReceiver, None]:
    async with OtlpReceiver() as receiver:
        yield receiver


@pytest_asyncio.fixture(loop_scope="module", scope="module", name="cluster")
async def _cluster(
    tmp_path_factory: pytest.TempPathFactory, receiver: OtlpReceiver
) -> AsyncGenerator[LocalCluster, None]:
    base = {
        # 600 tokens are five chunks; one answer at a time, so that a second request has to wait for its pages.
        "engine": {"mock": {"decode_us": 5000}, "max_batch_tokens": 128},
        "telemetry": {"otlp_endpoint": receiver.endpoint, "metrics_listen": "127.0.0.1:0"},
        "logging": {"format": "json"},
    }
    own = {"context": ["transfer.handoff_hold_s=0.4"], "generation": ["engine.max_running=1"]}
    options = replace(MOCK, base=base, own=own)
    async with running_cluster(options, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


WHOLE = {"route", "coordinator.route", "worker.context", "worker.generation", "kv.receive", "queue"}


async def trace_of(receiver: OtlpReceiver, request_id: int, *wanted: str) -> list[ReceivedSpan]:
    """All spans of a request, once those of WHOLE and the `wanted` ones are there and none misses its parent."""
    spans: list[ReceivedSpan] = []
    for _ in range(200):
        named_so = [one for one in receiver.spans if one.attributes.get("isthmus.request_id") == str(request_id)]
        trace_id = named_so[0].trace_id if named_so else ""
        spans = [one for one in receiver.spans if one.trace_id == trace_id]
        known = {one.span_id for one in spans}
        complete = WHOLE | set(wanted) <= {one.name for one in spans}
        if complete and all(one.parent_id in known for one in spans if one.parent_id):
            return spans
        await asyncio.sleep(0.1)
    raise AssertionError(f"the trace has {sorted(one.name for one in spans)}")


def named(spans: list[ReceivedSpan], name: str) -> ReceivedSpan:
    (span,) = [one for one in spans if one.name == name]
    return span


def children(spans: list[ReceivedSpan], parent: ReceivedSpan) -> set[str]:
    return {one.name for one in spans if one.parent_id == parent.span_id}


async def test_the_trace_of_a_request_has_every_part(cluster: LocalCluster, receiver: OtlpReceiver):
    prompt = [32 + index * 5 % 95 for index in range(600)]
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer(prompt, max_tokens=6)
    spans = await trace_of(receiver, answer.request_id, "prefill.chunk", "consensus", "decode", "kv.transfer")
    (root,) = [one for one in spans if not one.parent_id]
    assert {"gen_ai.operation.name", "gen_ai.request.model", "gen_ai.request.max_tokens"} <= set(root.attributes)
    assert root.attributes["gen_ai.usage.input_tokens"] == 600
    assert root.attributes["gen_ai.usage.output_tokens"] == 6
    assert root.attributes["gen_ai.response.finish_reasons"] == "length"
    assert "first_token" in {name for name, _ in root.events}
    assert {"route", "worker.context", "worker.generation"} <= children(spans, root)
    assert "coordinator.route" in children(spans, named(spans, "route"))
    context, generation = named(spans, "worker.context"), named(spans, "worker.generation")
    assert {"queue", "prefill"} <= children(spans, context)
    assert {"queue", "kv.receive", "consensus", "decode"} <= children(spans, generation)
    agreed, decode = named(spans, "consensus"), named(spans, "decode")
    assert agreed.end_ns <= decode.start_ns + 1_000_000, "they agree, then they act"
    chunks = sorted((one for one in spans if one.name == "prefill.chunk"), key=lambda one: one.start_ns)
    assert [one.attributes["isthmus.token_begin"] for one in chunks] == [0, 128, 256, 384, 512]
    assert chunks[-1].attributes["isthmus.token_end"] == 600
    assert {one.parent_id for one in chunks} == {named(spans, "prefill").span_id}
    assert [one.links for one in chunks] == [(), *((one.span_id,) for one in chunks[:-1])]
    transfer = named(spans, "kv.transfer")
    assert transfer.parent_id == named(spans, "kv.receive").span_id
    assert transfer.attributes["kv.outcome"] == "delivered"
    assert str(transfer.attributes["kv.path"]).startswith("nixl/")
    for number in ("kv.bytes", "kv.descriptors", "kv.plan_ms", "kv.post_ms", "kv.wire_ms"):
        assert float(transfer.attributes[number]) > 0, number
    assert {"kv.queue_ms", "kv.peer.incarnation", "isthmus.attempt"} <= set(transfer.attributes)
    assert transfer.attributes["kv.mode"] in ("direct", "bounced", "mixed")
    assert transfer.attributes["kv.why"]
    route = named(spans, "route")
    assert {"isthmus.placement.policy", "isthmus.placement.candidates", "isthmus.placement.score"} <= set(
        route.attributes
    )
    for span in spans:
        assert span.start_ns <= span.end_ns
        assert not span.error
        assert {"service.name", "service.version"} <= set(span.resource)
    assert transfer.resource["isthmus.role"] == "context"
    assert transfer.resource["service.instance.id"] == CONTEXT


async def test_the_workers_remember_a_request_by_themselves(cluster: LocalCluster):
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer([65] * 300, max_tokens=4)
    await assert_idle(cluster)
    kinds: dict[str, list[str]] = {}
    for spec in cluster.specs:
        if spec.name not in (CONTEXT, GENERATION):
            continue
        async with open_channel(spec.address) as channel:
            stub = worker_service_pb2_grpc.WorkerServiceStub(channel)
            found = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(request_id=answer.request_id), timeout=10)
            latest = await stub.GetTimeline(timeline_pb2.GetTimelineRequest(limit=1), timeout=10)
            unknown = await stub.GetTimeline(
                timeline_pb2.GetTimelineRequest(request_id=answer.request_id + 1), timeout=10
            )
        (leg,) = found.legs
        assert latest.legs[0].key == leg.key
        assert not unknown.legs
        assert (leg.outcome, leg.prompt_tokens, leg.instance_id) == ("ok", 300, spec.name)
        names = [timeline_pb2.TimelineKind.Name(entry.kind).removeprefix("TIMELINE_KIND_") for entry in leg.entries]
        kinds[leg.leg] = sorted(names)
        assert all(entry.begin_unix_ns >= leg.begin_unix_ns - 1_000_000 for entry in leg.entries)
        moved = [entry for entry in leg.entries if entry.bytes]
        assert len(moved) == 1
        assert moved[0].outcome == "delivered"
    assert kinds["context"] == ["FIRST_TOKEN", "PREFILL_CHUNK", "PREFILL_CHUNK", "PREFILL_CHUNK", "QUEUE", "TRANSFER"]
    assert kinds["generation"] == ["CONSENSUS", "DECODE", "QUEUE", "RECEIVE"]


async def test_every_process_counts_what_it_does(cluster: LocalCluster):
    processes = [spec.name for spec in cluster.specs]
    before = {name: await scrape(cluster, name) for name in processes}
    async with Client(cluster.grpc_endpoint) as client:
        answers = [await client.answer([66] * 40, max_tokens=5) for _ in range(3)]
        with pytest.raises(IsthmusError):
            await client.answer([66] * 9000)
    await assert_idle(cluster)
    after = {name: await scrape(cluster, name) for name in processes}

    def grown(process: str, metric: str, **labels: str) -> float:
        return total(after[process], metric, **labels) - total(before[process], metric, **labels)

    assert grown("router", "isthmus_requests_total", outcome="ok", model="mock") == 3
    assert grown("router", "isthmus_requests_total", outcome="invalid_argument") == 1
    assert grown("router", "isthmus_refusals_total", reason="invalid_field") == 1
    assert grown("router", "isthmus_prompt_tokens_total") == 120
    assert grown("router", "isthmus_generation_tokens_total") == 15
    for name in ("time_to_first_token", "time_per_output_token", "e2e_request_latency", "route_time"):
        assert grown("router", f"isthmus_{name}_seconds_count") == 3
    assert grown("coordinator", "isthmus_placements_total", outcome="ok") == 3
    assert total(after["coordinator"], "isthmus_members", state="active") == 2
    assert grown(CONTEXT, "isthmus_legs_total", leg="context", outcome="ok") == 3
    assert grown(GENERATION, "isthmus_legs_total", leg="generation", outcome="ok") == 3
    assert grown(CONTEXT, "isthmus_prefix_cache_queries_total") == 120
    assert grown(CONTEXT, "isthmus_prefix_cache_hits_total") == 64, "the second and the third begin alike"
    assert grown(CONTEXT, "isthmus_transfers_total", outcome="delivered") == 3
    assert grown(GENERATION, "isthmus_handoffs_total", outcome="delivered") == 3
    assert grown(GENERATION, "isthmus_handoff_time_seconds_count") == 3
    moved = [one.end.timeline.handoff for one in answers]
    written = sum(one.bytes for one in moved if one is not None)
    assert moved[0] is not None
    assert grown(CONTEXT, "isthmus_transfer_bytes_total", path=moved[0].path) == written > 0
    assert total(after[GENERATION], "isthmus_peers", state="ready") == 1
    assert total(after[GENERATION], "isthmus_ledger_pages") == 0
    assert total(after[GENERATION], "isthmus_kv_blocks", state="free") > 0
    for name in processes:
        if name != "coordinator":
            assert total(after[name], "isthmus_coordinator_connected") == 1
        known = {one.prometheus for one in CATALOGUE}
        found = {sample for sample in after[name] if sample.startswith("isthmus_")}
        assert {one.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count") for one in found} <= known
        if shutil.which("promtool"):
            text = (await scrape_text(cluster, name)).encode()
            check = ["promtool", "check", "metrics", "--extended"]
            result = await asyncio.to_thread(
                subprocess.run, check, input=text, capture_output=True, timeout=30, check=False
            )
            assert result.returncode in (0, 3), result.stderr  # 3: opinions about names
            assert b"error" not in result.stderr.lower()


async def test_a_request_that_had_to_be_recomputed_says_so_everywhere(cluster: LocalCluster, receiver: OtlpReceiver):
    """The generation instance is busy until the context instance has given the pages up."""
    async with Client(cluster.grpc_endpoint) as client:
        first = asyncio.create_task(client.answer([67] * 20, max_tokens=250))
        await asyncio.sleep(0.3)
        prompt = [68] * 50
        answer = await client.answer(prompt, max_tokens=4)
        await first
    assert list(answer.token_ids) == oracle(prompt, 4)
    spans = await trace_of(receiver, answer.request_id, "decode")
    leg = named(spans, "worker.generation")
    assert leg.attributes["isthmus.recomputed"] is True
    assert not leg.error, "the request came through in the end"
    reasons = [about["isthmus.reason"] for name, about in leg.events if name == "handoff_failed"]
    assert reasons
    assert all(reasons)
    assert {"prefill", "decode"} <= children(spans, leg)
    assert any(one.error for one in spans if one.name == "kv.receive")
    assert total(await scrape(cluster, GENERATION), "isthmus_recomputed_requests_total") == 1
    warnings = [line for line in log_lines(cluster, GENERATION) if line["level"] == "WARNING" and "request_id" in line]
    (line,) = [line for line in warnings if line["request_id"] == answer.request_id]
    assert "computed here" in line["message"]
    assert line["trace_id"] == leg.trace_id


async def test_a_failed_request_tells_its_story(cluster: LocalCluster, receiver: OtlpReceiver):
    request_id = (1 << 41) + 77
    async with Client(cluster.grpc_endpoint) as client:
        with pytest.raises(IsthmusError) as caught:
            await client.answer([69] * 20, max_tokens=4000, timeout_s=0.7, request_id=request_id)
    assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
    spans = await trace_of(receiver, request_id, "kv.transfer")
    (root,) = [one for one in spans if not one.parent_id]
    assert "did not finish within" in root.error
    leg = named(spans, "worker.generation")
    assert "deadline" in leg.error or "went away" in leg.error
    assert not named(spans, "kv.transfer").error
    (line,) = [one for one in log_lines(cluster, "router") if one.get("request_id") == request_id]
    assert (line["message"], line["outcome"], line["level"]) == ("request ended", "deadline_exceeded", "WARNING")
    assert line["trace_id"] == root.trace_id


async def test_no_line_holds_what_was_asked_and_lines_join_the_trace(cluster: LocalCluster, receiver: OtlpReceiver):
    secret = "Zebra9 Quartz7"
    async with Client(cluster.grpc_endpoint) as client:
        answer = await client.answer(secret, max_tokens=4)
    spans = await trace_of(receiver, answer.request_id, "decode")
    (line,) = [one for one in log_lines(cluster, "router") if one.get("request_id") == answer.request_id]
    assert line["trace_id"] == spans[0].trace_id
    assert (line["outcome"], line["completion_tokens"]) == ("ok", 4)
    assert {line["context_instance"], line["generation_instance"]} == {CONTEXT, GENERATION}
    for spec in cluster.specs:
        text = cluster.process(spec.name).log_path.read_text(errors="replace")
        assert secret not in text
        assert answer.text not in text or not answer.text.strip()
    assert not [one for one in spans if secret in str(one)]
