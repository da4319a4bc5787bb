"""Python client of the router: text in, text out, streamed.

    async with Client("127.0.0.1:50051") as client:
        async for part in client.generate("Once upon a time", max_tokens=32):
            print(part.text, end="")

`SyncClient` is the same for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import grpc.aio
from isthmus.v1 import (
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
)

from isthmus_client.timeline import Timeline, timeline_from_report
from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel

T = TypeVar("T")
FINISH_REASONS = {1: "stop", 2: "length"}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class End:
    """End of an answer. `reason`: "stop" or "length"."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    timeline: Timeline


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an answer: new text (never half a character), its token ids; `end` is set on the last part."""

    text: str
    token_ids: tuple[int, ...]
    request_id: int
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for; `max_model_len` is prompt plus output in tokens."""

    name: str
    max_model_len: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    request_id: int
    end: End


Prompt = str | Sequence[int] | Sequence[Message]


def build_request(
    prompt: Prompt,
    *,
    model: str = "",
    max_tokens: int | None = None,
    ignore_eos: bool = False,
    request_id: int = 0,
) -> inference_service_pb2.InferenceServiceGenerateRequest:
    """The request for a prompt: text, token ids, or messages (which go through the model's chat template)."""
    request = inference_service_pb2.InferenceServiceGenerateRequest(
        model=model, max_tokens=max_tokens, ignore_eos=ignore_eos, request_id=request_id
    )
    if isinstance(prompt, str):
        request.prompt = prompt
        return request
    messages = [item for item in prompt if isinstance(item, Message)]
    ids = [item for item in prompt if isinstance(item, int)]
    if messages and not ids:
        rows = [inference_service_pb2.ChatMessage(role=item.role, content=item.content) for item in messages]
        request.chat.CopyFrom(inference_service_pb2.ChatInput(messages=rows))
    elif not messages:
        request.prompt_token_ids.CopyFrom(inference_service_pb2.TokenInput(ids=ids))
    else:
        raise ValueError("prompt mixes messages and token ids; give one kind")
    return request


def _part(response: inference_service_pb2.InferenceServiceGenerateResponse, request_id: int) -> Part:
    end = None
    if response.HasField("finished"):
        finished = response.finished
        end = End(
            reason=FINISH_REASONS.get(finished.reason, f"unknown reason {finished.reason}"),
            prompt_tokens=finished.prompt_tokens,
            completion_tokens=finished.completion_tokens,
            timeline=timeline_from_report(finished.report),
        )
    return Part(response.text, tuple(response.token_ids), request_id, end)


class Client:
    """A connection to a router. Errors are `isthmus_core.errors.IsthmusError` with code, message and typed detail."""

    def __init__(self, endpoint: str = "127.0.0.1:50051", *, tls: TlsConfig | None = None) -> None:
        self._channel = open_channel(endpoint, tls)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; calls that run are cancelled."""
        await self._channel.close()

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        request_id: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncGenerator[Part, None]:
        """Stream the answer. Closing the iterator early cancels the request on every hop."""
        request = build_request(
            prompt, model=model, max_tokens=max_tokens, ignore_eos=ignore_eos, request_id=request_id
        )
        call = self._stub.Generate(request, timeout=timeout_s)
        try:
            async for response in call:
                request_id = response.request_id or request_id
                yield _part(response, request_id)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def answer(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        max_tokens: int | None = None,
        ignore_eos: bool = False,
        request_id: int = 0,
        timeout_s: float | None = None,
    ) -> Answer:
        """The whole answer at once."""
        texts: list[str] = []
        ids: list[int] = []
        parts = self.generate(
            prompt,
            model=model,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            request_id=request_id,
            timeout_s=timeout_s,
        )
        async for part in parts:
            texts.append(part.text)
            ids.extend(part.token_ids)
            if part.end is not None:
                return Answer("".join(texts), tuple(ids), part.request_id, part.end)
        raise RuntimeError("the router closed the stream without an end")

    async def list_models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """Models that can be asked for now."""
        try:
            response = await self._stub.ListModels(inference_service_pb2.ListModelsRequest(), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        return [Model(card.name, card.max_model_len) for card in response.models]


async def get_cluster(
    coordinator: str, *, tls: TlsConfig | None = None, timeout_s: float = 10.0
) -> coordinator_service_pb2.GetClusterResponse:
    """Members, pairs and models as the coordinator at `coordinator` knows them. Raises IsthmusError."""
    channel = open_channel(coordinator, tls)
    try:
        stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
        return await stub.GetCluster(coordinator_service_pb2.GetClusterRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    finally:
        await channel.close()


class SyncClient:
    """`Client` for programs without an event loop: it owns one on a thread. Use it as a context manager."""

    def __init__(self, endpoint: str = "127.0.0.1:50051", *, tls: TlsConfig | None = None) -> None:
        self._endpoint, self._tls = endpoint, tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="isthmus-client", daemon=True)
        self._client: Client | None = None

    def __enter__(self) -> SyncClient:
        self._thread.start()
        self._client = self._run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> Client:
        return Client(self._endpoint, tls=self._tls)  # channels belong to the loop they are made on

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise RuntimeError("SyncClient is not open: use it as `with SyncClient(...) as client`")
        return self._client

    def generate(self, prompt: Prompt, *, model: str = "", max_tokens: int | None = None) -> Iterator[Part]:
        """Stream the answer."""
        parts = self._opened.generate(prompt, model=model, max_tokens=max_tokens)

        async def following() -> Part | None:
            return await anext(parts, None)

        try:
            while (part := self._run(following())) is not None:
                yield part
        finally:
            self._run(_ended(parts))

    def answer(self, prompt: Prompt, *, model: str = "", max_tokens: int | None = None) -> Answer:
        """The whole answer at once."""
        return self._run(self._opened.answer(prompt, model=model, max_tokens=max_tokens))

    def list_models(self) -> list[Model]:
        """Models that can be asked for now."""
        return self._run(self._opened.list_models())


async def _ended(parts: AsyncGenerator[Part, None]) -> None:
    await parts.aclose()
