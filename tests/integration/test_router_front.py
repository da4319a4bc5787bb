"""Both front ends over real sockets: the openai SDK and gRPC in front, workers over gRPC behind."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import httpx
import openai
import pytest
from grpc_health.v1 import health_pb2
from isthmus.v1 import errors_pb2
from isthmus.v1 import inference_service_pb2 as pb

from isthmus_core import token_ids
from isthmus_core.errors import Overloaded, StartError, from_rpc_error
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey
from isthmus_core.process import free_port
from isthmus_core.tracing import TraceContext
from isthmus_router.http.server import bind
from isthmus_router.ports import ConnectionLost, FinishReason, Leg, LegKind, Sampling, Tokens
from isthmus_router.worker_client import WorkerClient
from router_fakes import FakeInstance, FakeModel, FakePlacement
from router_site import Router, Worker

pytestmark = pytest.mark.integration


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async with Router().running() as router:
        yield router


def ask(prompt: str = "olleh", **fields: object) -> pb.InferenceServiceGenerateRequest:
    return pb.InferenceServiceGenerateRequest(model="m", prompt=prompt, **fields)  # type: ignore[arg-type]


async def test_grpc_streams_text_and_reports(router: Router) -> None:
    request = ask(max_tokens=5, request_id=MIN_GLOBAL_ID + 5)
    parts = [part async for part in router.stub.Generate(request, metadata=(("traceparent", "bad"),))]
    assert "".join(part.text for part in parts) == "hello"
    assert [part.request_id for part in parts] == [MIN_GLOBAL_ID + 5] + [0] * (len(parts) - 1)
    finished = parts[-1].finished
    assert (finished.prompt_tokens, finished.completion_tokens) == (5, 5)
    assert finished.report.generation_instance == "generation"
    (context,), (generation,) = router.context.servicer.requests, router.generation.servicer.requests
    assert context.key.request_id == generation.key.request_id == MIN_GLOBAL_ID + 5
    assert generation.context_phase.instance_id == "context"
    # The context leg ran to its end: a cancelled call could have withdrawn the pages.
    await router.until("r.context.servicer.completed == 1")
    assert router.context.servicer.cancelled == 0
    assert router.context.servicer.aborts == []


async def test_chat_and_tokens_over_grpc(router: Router) -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x")])
    tokens = pb.TokenInput(ids=[99, 98, 97])
    for source, prompt_tokens in (({"chat": chat}, len("user: x\nassistant:")), ({"prompt_token_ids": tokens}, 3)):
        request = pb.InferenceServiceGenerateRequest(**source, max_tokens=2)  # type: ignore[arg-type]
        *_, last = [part async for part in router.stub.Generate(request)]
        assert last.finished.prompt_tokens == prompt_tokens


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.InferenceServiceGenerateRequest(model="m"), "input"),
        (pb.InferenceServiceGenerateRequest(model="m", chat=pb.ChatInput()), "chat.messages"),
        (
            pb.InferenceServiceGenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="boss")])),
            "chat.messages[0].role",
        ),
        (pb.InferenceServiceGenerateRequest(prompt_token_ids=pb.TokenInput(ids=[999])), "prompt_token_ids.ids[0]"),
        (ask(""), "prompt"),
        (ask(max_tokens=0), "max_tokens"),
        (ask(max_tokens=4092), "max_tokens"),
        (ask(request_id=5), "request_id"),
    ],
)
async def test_wrong_requests_are_invalid_argument_with_the_field(
    router: Router, request_: pb.InferenceServiceGenerateRequest, field: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in router.stub.Generate(request_)]
    error = from_rpc_error(caught.value)
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(error.detail, errors_pb2.InvalidField)
    assert error.detail.field == field


async def test_list_models(router: Router) -> None:
    models = (await router.stub.ListModels(pb.ListModelsRequest())).models
    assert [(model.name, model.max_model_len) for model in models] == [("m", 4096)]


async def test_the_openai_sdk(router: Router) -> None:
    async with router.openai() as client:
        answer = await client.completions.create(model="m", prompt="olleh", max_tokens=5)
        assert answer.choices[0].text == "hello"
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "x"}],
            max_completion_tokens=9,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "user: x\nassistant:"[::-1][:9]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 9
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).id == "m"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="m", prompt="x", n=200)
        assert caught.value.param == "n"
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nope", prompt="x")


async def test_the_openai_sdk_sees_overload_and_retries(router: Router) -> None:
    router.context.servicer.error = Overloaded("waiting", 1, retry_after_s=0.1)
    async with router.openai() as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="m", prompt="olleh")
    async with router.openai(retries=1) as client:
        task = asyncio.create_task(client.completions.create(model="m", prompt="olleh"))
        await router.until("len(r.context.servicer.requests) == 2")
        router.context.servicer.error = None
        assert (await task).choices[0].text == "hello"


@pytest.mark.parametrize("front", ["grpc", "http"])
async def test_a_client_that_leaves_cancels_on_every_hop(router: Router, front: str) -> None:
    router.generation.servicer.hang_after = 1
    if front == "grpc":
        call = router.stub.Generate(ask())
        await call.read()
        await router.generation.servicer.hanging.wait()
        call.cancel()
    else:
        async with router.openai() as client:
            stream = await client.completions.create(model="m", prompt="olleh", stream=True)
            await anext(aiter(stream))
            await router.generation.servicer.hanging.wait()
            await stream.close()
    await router.until("r.generation.servicer.cancelled == 1")
    await router.until("len(r.coordinator.finished) == 1")


async def test_a_client_that_leaves_before_the_hand_off_withdraws_it(router: Router) -> None:
    router.generation.servicer.hang_after = 0
    call = router.stub.Generate(ask(request_id=MIN_GLOBAL_ID + 9))
    await router.generation.servicer.hanging.wait()
    call.cancel()
    await router.until(f"r.context.servicer.aborts == [{MIN_GLOBAL_ID + 9}]")


async def test_the_clients_deadline_travels_on(router: Router) -> None:
    router.generation.servicer.hang_after = 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in router.stub.Generate(ask(), timeout=1.0)]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await router.until("r.generation.servicer.cancelled == 1")
    for servicer in (router.context.servicer, router.generation.servicer):
        assert 0 < servicer.time_left[0] < 2.0  # the wire rounds up


async def test_the_routers_own_deadline_is_a_504() -> None:
    async with Router(request_timeout_s=0.5).running() as router:
        router.generation.servicer.hang_after = 0
        async with router.openai() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.completions.create(model="m", prompt="olleh")
        assert caught.value.status_code == 504


async def test_a_worker_that_dies_is_named_and_its_successor_is_used(router: Router) -> None:
    router.generation.servicer.hang_after = 1
    parts = aiter(router.stub.Generate(ask()))
    await anext(parts)
    await router.generation.servicer.hanging.wait()
    await router.generation.rpc.stop(0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in parts]
    detail = from_rpc_error(caught.value).detail
    assert isinstance(detail, errors_pb2.WorkerLost)
    assert (detail.instance_id, detail.phase) == ("generation", "decode")

    endpoint = router.coordinator.placement.generation.endpoint
    successor = Worker("successor")
    router.generation = successor
    placed = await successor.start(endpoint)
    context = router.coordinator.placement.context
    router.coordinator.placement = FakePlacement(context, placed)
    assert "".join([part.text async for part in router.stub.Generate(ask(max_tokens=5))]) == "hello"
    assert router.workers.open_channels == 2


async def test_an_instance_that_is_not_there(router: Router) -> None:
    router.coordinator.placement = FakePlacement(None, FakeInstance("ghost", f"127.0.0.1:{free_port()}"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        _ = [part async for part in router.stub.Generate(ask())]
    detail = from_rpc_error(caught.value).detail
    assert isinstance(detail, errors_pb2.WorkerLost)
    assert (detail.instance_id, detail.phase) == ("ghost", "prefill")
    assert router.workers.open_channels == 0


async def test_calls_of_workers_carry_the_trace_and_replace_old_incarnations() -> None:
    worker, client = Worker("w"), WorkerClient()
    instance = await worker.start()
    trace = TraceContext(b"t" * 16, b"s" * 8)
    leg = Leg(RequestKey(MIN_GLOBAL_ID), LegKind.BOTH, token_ids.pack([1, 2]), Sampling(2))
    for incarnation in (b"1" * 16, b"1" * 16, b"2" * 16):
        reborn = FakeInstance("w", instance.endpoint, incarnation)
        events = [event async for event in client.generate(reborn, leg, timeout_s=10, trace=trace)]
        assert events[:2] == [Tokens((2,)), Tokens((1,), reason=FinishReason.LENGTH)]
        assert client.open_channels == 1
    assert [metadata["traceparent"] for metadata in worker.servicer.metadata] == [trace.to_traceparent()] * 3
    await client.abort(FakeInstance("w", instance.endpoint, b"2" * 16), leg.key)
    assert worker.servicer.aborts == [MIN_GLOBAL_ID]
    await client.close()
    await worker.rpc.stop(0)


async def test_channels_that_nobody_uses_are_closed() -> None:
    now = 0.0
    client = WorkerClient(clock=lambda: now)
    for number in range(3):
        with pytest.raises(ConnectionLost):
            await client.abort(FakeInstance("gone", f"127.0.0.1:{free_port()}"), RequestKey(MIN_GLOBAL_ID))
        assert client.open_channels == 0, number
    workers = [Worker("a"), Worker("b")]
    first, second = [await worker.start() for worker in workers]
    await client.abort(first, RequestKey(MIN_GLOBAL_ID))
    now = 1000.0
    await client.abort(second, RequestKey(MIN_GLOBAL_ID))
    assert client.open_channels == 1
    await client.close()
    await asyncio.gather(*(worker.rpc.stop(0) for worker in workers))


async def test_health_follows_the_cluster(router: Router) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        assert (await client.get(f"{router.url}/health")).status_code == 200
        router.coordinator.models = []
        await router.health(health_pb2.HealthCheckResponse.NOT_SERVING)
        assert (await client.get(f"{router.url}/health")).status_code == 503
        router.coordinator.models = [FakeModel("m", 10)]
        await router.health(health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("front", ["grpc", "http"])
async def test_stopping_finishes_running_streams(front: str) -> None:
    async with Router().running() as router:
        async with router.openai() as client:
            if front == "grpc":
                parts = aiter(router.stub.Generate(ask("x" * 2000)))
                await anext(parts)
                router.stopping.set()
                rest = [part async for part in parts]
                assert rest[-1].finished.completion_tokens == 2000
            else:
                stream = await client.completions.create(model="m", prompt="x" * 3000, max_tokens=1000, stream=True)
                chunks = aiter(stream)
                await anext(chunks)
                router.stopping.set()
                assert [chunk async for chunk in chunks][-1].choices[0].finish_reason == "length"
        await router.task
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(trust_env=False) as late:
                await late.get(f"{router.url}/health")


async def test_streams_that_outlast_the_drain_are_ended() -> None:
    async with Router(drain_s=0.2).running() as router:
        router.generation.servicer.hang_after = 1
        call = router.stub.Generate(ask())
        await call.read()
        async with router.openai() as client:
            stream = await client.completions.create(model="m", prompt="olleh", stream=True)
            await anext(aiter(stream))
            router.stopping.set()
            await router.task
        await router.until("r.generation.servicer.cancelled == 2")


async def test_taken_ports_are_refused() -> None:
    with bind("127.0.0.1:0") as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(StartError, match=r"router\.http_listen"):
            bind(f"127.0.0.1:{port}")
