"""isthmus.v1.InferenceService: parse, run the pipeline, translate its errors."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Generator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar, cast

import grpc.aio
from isthmus.v1 import inference_service_pb2, inference_service_pb2_grpc

from isthmus_core.config import ClientsConfig
from isthmus_core.errors import DeadlineExceeded, IsthmusError
from isthmus_core.rpc import RpcServer, abort_with, incoming_trace
from isthmus_router.affinity import SESSION_HEADER, TENANT_HEADER
from isthmus_router.clients import Caller, Gate
from isthmus_router.grpc_messages import parse_generate, parse_text, to_response
from isthmus_router.pipeline import Pipeline
from isthmus_router.requests import GenerateRequest, TokenInput

T = TypeVar("T")
_Request = inference_service_pb2.InferenceServiceGenerateRequest
_Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """The gRPC front end of a pipeline. `request_timeout_s`: deadline of calls that have none; `client_timeout_s`: a
    client that takes nothing from its stream for so long is dropped; `tenant_header`: metadata that names a tenant.
    Without a `gate` everybody may call."""

    def __init__(
        self,
        pipeline: Pipeline,
        request_timeout_s: float,
        client_timeout_s: float,
        tenant_header: str = TENANT_HEADER,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate or Gate(ClientsConfig(), time.monotonic)
        self._tenant_header = tenant_header
        self._pipeline = pipeline
        self._request_timeout_s = request_timeout_s
        self._client_timeout_s = client_timeout_s

    async def Generate(self, request: _Request, context: _Context) -> None:
        """Stream the answers. The client's deadline (or the configured one) covers the whole request."""
        timeout_s = self._timeout_s(context)

        async def generate() -> None:
            with self._counting():
                caller = self._enter(context)
                parsed = parse_generate(
                    request,
                    timeout_s,
                    incoming_trace(context),
                    session=_metadata(context, SESSION_HEADER),
                    tenant=caller.tenant,
                    quota=caller.quota,
                )
            await self._stream(parsed, context)

        await self._bounded(generate(), context)

    async def Tokenize(
        self, request: inference_service_pb2.TokenizeRequest, context: _Context
    ) -> inference_service_pb2.TokenizeResponse:
        """Token ids of an input."""

        async def tokenize() -> list[int]:
            with self._counting():
                self._enter(context)
                source = parse_text(request, special=not request.no_special_tokens, known="prompt and chat")
                _, ids, _ = await self._pipeline.tokenize(request.model, source)
            return ids

        return inference_service_pb2.TokenizeResponse(token_ids=await self._bounded(tokenize(), context))

    async def Detokenize(
        self, request: inference_service_pb2.DetokenizeRequest, context: _Context
    ) -> inference_service_pb2.DetokenizeResponse:
        """Text of token ids."""

        async def detokenize() -> str:
            with self._counting():
                self._enter(context)
                source = TokenInput(tuple(request.token_ids), "token_ids")
                return await self._pipeline.detokenize(request.model, source, skip_special=request.skip_special_tokens)

        return inference_service_pb2.DetokenizeResponse(text=await self._bounded(detokenize(), context))

    async def ListModels(
        self, request: inference_service_pb2.ListModelsRequest, context: _Context
    ) -> inference_service_pb2.ListModelsResponse:
        """Models that can be asked for now."""

        async def cards() -> list[inference_service_pb2.ModelCard]:
            with self._counting():
                self._enter(context)
            return [
                inference_service_pb2.ModelCard(name=model.name, max_model_len=model.max_model_len)
                for model in self._pipeline.models()
            ]

        return inference_service_pb2.ListModelsResponse(models=await self._bounded(cards(), context))

    def _enter(self, context: _Context) -> Caller:
        """Who calls. Raises Unauthenticated or RateLimited."""
        named = _metadata(context, self._tenant_header)
        return self._gate.enter(_metadata(context, "authorization"), named)

    @contextmanager
    def _counting(self) -> Generator[None]:
        """Count what is refused inside: the pipeline does not see it as a request."""
        try:
            yield
        except IsthmusError as error:
            self._pipeline.refused(error)
            raise

    async def _bounded(self, work: Awaitable[T], context: _Context) -> T:
        """Do `work` within the call's deadline; its errors end the call."""
        timeout_s = self._timeout_s(context)
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            return await abort_with(context, DeadlineExceeded("the request", timeout_s))
        except IsthmusError as error:
            return await abort_with(context, error)

    async def _stream(self, request: GenerateRequest, context: _Context) -> None:
        first = True
        async with aclosing(self._pipeline.generate(request)) as parts:
            async for part in parts:
                response = to_response(part)
                if first:
                    response.request_id = part.request_id
                    first = False
                await self._write(response, context)

    async def _write(self, response: Any, context: _Context) -> None:
        """A write waits for the client to read; the legs hold pages meanwhile."""
        try:
            async with asyncio.timeout(self._client_timeout_s):
                await context.write(response)
        except TimeoutError:
            raise DeadlineExceeded("reading the answer", self._client_timeout_s) from None

    def _timeout_s(self, context: _Context) -> float:
        # The stubs say float; without a deadline it is None or infinite, depending on grpc's version.
        left = cast("float | None", context.time_remaining())
        return self._request_timeout_s if left is None or math.isinf(left) else left


def _metadata(context: _Context, name: str) -> str:
    """An entry of the call's metadata, "" when there is none."""
    value = dict(context.invocation_metadata() or ()).get(name, "")
    return value.decode("latin-1") if isinstance(value, bytes) else value


def add_inference_service(rpc: RpcServer, servicer: InferenceServicer) -> None:
    """Register the service, with reflection and health, on a server that has not started."""
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, rpc.server)
    rpc.expose(inference_service_pb2.DESCRIPTOR)
