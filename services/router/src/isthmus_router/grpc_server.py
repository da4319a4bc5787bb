"""isthmus.v1.InferenceService: parse, run the pipeline, translate its errors."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import cast

import grpc.aio
from isthmus.v1 import generation_pb2, inference_service_pb2, inference_service_pb2_grpc

from isthmus_core.errors import DeadlineExceeded, InvalidRequest, IsthmusError
from isthmus_core.rpc import RpcServer, abort_with, incoming_trace
from isthmus_core.tracing import TraceContext
from isthmus_router.pipeline import Pipeline
from isthmus_router.requests import ChatInput, End, GenerateRequest, Part, TextInput, TokenInput
from isthmus_router.tokenizer import Turn

OPERATION = "isthmus.v1.InferenceService/Generate"

_Request = inference_service_pb2.InferenceServiceGenerateRequest
_Response = inference_service_pb2.InferenceServiceGenerateResponse
_Context = grpc.aio.ServicerContext[_Request, _Response]
_ListContext = grpc.aio.ServicerContext[
    inference_service_pb2.ListModelsRequest, inference_service_pb2.ListModelsResponse
]


class InferenceServicer(inference_service_pb2_grpc.InferenceServiceServicer):
    """The gRPC front end of a pipeline. `request_timeout_s`: deadline of calls that have none."""

    def __init__(self, pipeline: Pipeline, request_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._request_timeout_s = request_timeout_s

    async def Generate(self, request: _Request, context: _Context) -> None:
        """Stream an answer. The client's deadline (or the configured one) covers the whole request."""
        timeout_s = self._timeout_s(context)
        try:
            # Also bounds a client that does not read: a write waits for it, whatever the legs do.
            async with asyncio.timeout(timeout_s):
                await self._stream(parse_request(request, timeout_s, incoming_trace(context)), context)
        except TimeoutError:
            await abort_with(context, DeadlineExceeded("the request", timeout_s))
        except IsthmusError as error:
            await abort_with(context, error)

    async def ListModels(
        self, request: inference_service_pb2.ListModelsRequest, context: _ListContext
    ) -> inference_service_pb2.ListModelsResponse:
        """Models that can be asked for now."""
        cards = [
            inference_service_pb2.ModelCard(name=model.name, max_model_len=model.max_model_len)
            for model in self._pipeline.models()
        ]
        return inference_service_pb2.ListModelsResponse(models=cards)

    async def _stream(self, request: GenerateRequest, context: _Context) -> None:
        first = True
        async with aclosing(self._pipeline.generate(request)) as parts:
            async for part in parts:
                response = _to_response(part)
                if first:
                    response.request_id = part.request_id
                    first = False
                await context.write(response)

    def _timeout_s(self, context: _Context) -> float:
        # The stubs say float; without a deadline it is None or infinite, depending on grpc's version.
        left = cast("float | None", context.time_remaining())
        return self._request_timeout_s if left is None or math.isinf(left) else left


def parse_request(request: _Request, timeout_s: float, trace: TraceContext | None) -> GenerateRequest:
    """The request in a message. Raises InvalidRequest when it has no input."""
    kind = request.WhichOneof("input")
    if kind == "prompt":
        source = TextInput(request.prompt)
    elif kind == "chat":
        turns = tuple(Turn(message.role, message.content) for message in request.chat.messages)
        source = ChatInput(turns, "chat.messages")
    elif kind == "prompt_token_ids":
        source = TokenInput(tuple(request.prompt_token_ids.ids), "prompt_token_ids.ids")
    else:
        raise InvalidRequest("input", "absent", "set one of prompt, chat and prompt_token_ids")
    return GenerateRequest(
        operation=OPERATION,
        model=request.model,
        input=source,
        timeout_s=timeout_s,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        ignore_eos=request.ignore_eos,
        request_id=request.request_id,
        trace=trace,
    )


def _to_response(part: Part | End) -> _Response:
    if isinstance(part, Part):
        return _Response(text=part.text, token_ids=part.token_ids)
    finished = inference_service_pb2.GenerateFinished(
        reason=generation_pb2.FinishReason.Name(part.reason.value),
        prompt_tokens=part.prompt_tokens,
        completion_tokens=part.completion_tokens,
        report=part.report,
    )
    return _Response(text=part.text, finished=finished)


def add_inference_service(rpc: RpcServer, servicer: InferenceServicer) -> None:
    """Register the service, with reflection and health, on a server that has not started."""
    inference_service_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, rpc.server)
    rpc.expose(inference_service_pb2.DESCRIPTOR)
