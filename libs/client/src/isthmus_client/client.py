"""Python client of the router: text in, text out, streamed.

    async with Client("127.0.0.1:50051") as client:
        async for part in client.generate("Once upon a time", max_tokens=32, temperature=0.7):
            print(part.text, end="")

`SyncClient` is the same for programs without an event loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Unpack

import grpc.aio
from isthmus.v1 import (
    coordinator_service_pb2,
    coordinator_service_pb2_grpc,
    inference_service_pb2,
    inference_service_pb2_grpc,
)

from isthmus_client.generation import Answer, Message, Options, Part, Prompt, build_request, parse_part
from isthmus_core.config import TlsConfig
from isthmus_core.errors import from_rpc_error
from isthmus_core.rpc import open_channel


@dataclass(frozen=True, slots=True)
class Model:
    """A model that can be asked for; `max_model_len` is prompt plus output in tokens."""

    name: str
    max_model_len: int


class Client:
    """A connection to a router. Errors are `isthmus_core.errors.IsthmusError` with code, message and typed detail."""

    def __init__(
        self, endpoint: str = "127.0.0.1:50051", *, tls: TlsConfig | None = None, api_key: str | None = None
    ) -> None:
        """`api_key`: for routers that ask for one."""
        self._channel = open_channel(endpoint, tls)
        self._shown = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._stub = inference_service_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection; calls that run are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> AsyncGenerator[Part, None]:
        """Stream the answers. Closing the iterator early cancels the request on every hop."""
        call = self._stub.Generate(build_request(prompt, **options), timeout=timeout_s, metadata=self._shown)
        request_id, reason = 0, ""
        try:
            async for response in call:
                request_id = response.request_id or request_id
                part = parse_part(response, request_id, reason)
                reason = part.reason or reason
                yield part
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()

    async def answer(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Answer:
        """The whole answer at once. Raises ValueError when `n` asks for several."""
        if options.get("n", 1) != 1:
            raise ValueError(f"n = {options.get('n')}: use `answers` for several")
        return (await self.answers(prompt, timeout_s=timeout_s, **options))[0]

    async def answers(
        self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]
    ) -> list[Answer]:
        """All `n` answers, whole."""
        parts: dict[int, list[Part]] = {}
        async with aclosing(self.generate(prompt, timeout_s=timeout_s, **options)) as stream:
            async for part in stream:
                if part.end is None:
                    parts.setdefault(part.index, []).append(part)
                    continue
                return [
                    Answer(
                        "".join(piece.text for piece in pieces),
                        tuple(token for piece in pieces for token in piece.token_ids),
                        part.request_id,
                        pieces[-1].reason or "",
                        pieces[-1].stopped_by,
                        tuple(entry for piece in pieces for entry in piece.logprobs),
                        part.end,
                    )
                    for _, pieces in sorted(parts.items())
                ]
        raise RuntimeError("the router closed the stream without an end")

    async def tokenize(
        self, prompt: str | Sequence[Message], *, model: str = "", timeout_s: float | None = None
    ) -> list[int]:
        """Token ids of text or messages, as `generate` would make them."""
        asked = build_request(prompt)
        request = inference_service_pb2.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.prompt = prompt
        else:
            request.chat.CopyFrom(asked.chat)
        try:
            return list((await self._stub.Tokenize(request, timeout=timeout_s, metadata=self._shown)).token_ids)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def detokenize(
        self, ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """Text of token ids."""
        request = inference_service_pb2.DetokenizeRequest(
            model=model, token_ids=ids, skip_special_tokens=skip_special_tokens
        )
        try:
            return (await self._stub.Detokenize(request, timeout=timeout_s, metadata=self._shown)).text
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

    async def list_models(self, *, timeout_s: float = 10.0) -> list[Model]:
        """Models that can be asked for now."""
        try:
            asked = inference_service_pb2.ListModelsRequest()
            response = await self._stub.ListModels(asked, timeout=timeout_s, metadata=self._shown)
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
