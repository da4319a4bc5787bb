"""The OpenAI endpoints, health and version."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isthmus_core.errors import DeadlineExceeded, InternalError, InvalidRequest, IsthmusError, UnknownModel
from isthmus_core.tracing import TraceContext, parse_traceparent
from isthmus_router.http.answers import ChatShape, CompletionShape
from isthmus_router.http.errors import HttpError, error_response
from isthmus_router.http.exchange import Answer
from isthmus_router.http.schemas import ChatCompletionRequest, CompletionRequest, parse_body
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ServedModel
from isthmus_router.requests import ChatInput, GenerateRequest, TextInput, TokenInput
from isthmus_router.tokenizer import Turn

# What OpenAI's completions endpoint generates when nothing is said.
COMPLETION_DEFAULT_MAX_TOKENS = 16


class Endpoints:
    """The handlers. `max_body_bytes`: larger request bodies are refused; `request_timeout_s`: deadline of a request."""

    def __init__(self, pipeline: Pipeline, *, max_body_bytes: int, request_timeout_s: float) -> None:
        self._pipeline = pipeline
        self._max_body_bytes = max_body_bytes
        self._request_timeout_s = request_timeout_s
        self._started = int(time.time())

    async def chat_completions(self, request: Request) -> Answer:
        """`POST /v1/chat/completions`."""
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        body = parse_body(ChatCompletionRequest, await self._body(request))
        # "developer" is the newer name of the system's turn.
        turns = (Turn("system" if m.role == "developer" else m.role, m.text) for m in body.messages)
        generate = GenerateRequest(
            operation="POST /v1/chat/completions",
            model=body.model,
            input=ChatInput(tuple(turns)),
            timeout_s=self._request_timeout_s,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
            ignore_eos=bool(body.ignore_eos),
            trace=_trace(request),
            arrived=arrived,
            arrived_ns=arrived_ns,
        )
        shape = ChatShape(self._model_name(body.model), int(time.time()))
        return Answer(self._pipeline, generate, shape, stream=bool(body.stream), include_usage=body.include_usage)

    async def completions(self, request: Request) -> Answer:
        """`POST /v1/completions`."""
        arrived, arrived_ns = time.monotonic(), time.time_ns()
        body = parse_body(CompletionRequest, await self._body(request))
        generate = GenerateRequest(
            operation="POST /v1/completions",
            model=body.model,
            input=_prompt(body),
            timeout_s=self._request_timeout_s,
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
            ignore_eos=bool(body.ignore_eos),
            trace=_trace(request),
            arrived=arrived,
            arrived_ns=arrived_ns,
        )
        shape = CompletionShape(self._model_name(body.model), int(time.time()))
        return Answer(self._pipeline, generate, shape, stream=bool(body.stream), include_usage=body.include_usage)

    async def models(self, _: Request) -> Response:
        """`GET /v1/models`."""
        return JSONResponse({"object": "list", "data": [self._card(model) for model in self._pipeline.models()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        name = request.path_params["name"]
        models = self._pipeline.models()
        for model in models:
            if model.name == name:
                return JSONResponse(self._card(model))
        raise UnknownModel(name, [model.name for model in models])

    async def health(self, _: Request) -> Response:
        """`GET /health`: 200 exactly when a request can be served now."""
        missing = self._pipeline.missing()
        if missing:
            return JSONResponse({"status": "unavailable", "missing": missing}, 503, {"retry-after": "1"})
        return JSONResponse({"status": "ok", "models": [model.name for model in self._pipeline.models()]})

    async def version(self, _: Request) -> Response:
        """`GET /version`."""
        return JSONResponse({"version": version("isthmus-router")})

    async def _body(self, request: Request) -> bytes:
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._request_timeout_s):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._max_body_bytes:
                        raise self._too_large()
        except TimeoutError:
            raise DeadlineExceeded("sending the request body", self._request_timeout_s) from None
        return bytes(body)

    def _too_large(self) -> HttpError:
        return HttpError(413, f"the body is larger than {self._max_body_bytes} bytes; send less", "body_too_large")

    def _model_name(self, asked: str) -> str:
        """Name in answers: as asked for; for an empty name the model that it means."""
        return asked or self._pipeline.default_model

    def _card(self, model: ServedModel) -> dict[str, object]:
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "isthmus",
            "max_model_len": model.max_model_len,
        }


def make_app(pipeline: Pipeline, *, max_body_bytes: int, request_timeout_s: float) -> Starlette:
    """The ASGI application over a pipeline."""
    endpoints = Endpoints(pipeline, max_body_bytes=max_body_bytes, request_timeout_s=request_timeout_s)
    routes = [
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
    ]
    handlers = {
        IsthmusError: _on_error,
        HTTPException: _on_http_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_crash,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _prompt(body: CompletionRequest) -> TextInput | TokenInput:
    prompt = body.prompt
    if isinstance(prompt, str):
        return TextInput(prompt)
    if all(isinstance(item, int) for item in prompt):
        return TokenInput(tuple(item for item in prompt if isinstance(item, int)))
    if len(prompt) != 1:
        raise InvalidRequest("prompt", f"a list of {len(prompt)}", "send one prompt per request")
    only = prompt[0]
    if isinstance(only, str):
        return TextInput(only, "prompt[0]")
    return TokenInput(tuple(only) if isinstance(only, list) else (only,), "prompt[0]")


def _trace(request: Request) -> TraceContext | None:
    header = request.headers.get("traceparent")
    return None if header is None else parse_traceparent(header)


async def _on_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, IsthmusError):
        raise error
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        raise error
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = error_response(
        HttpError(error.status_code, message, "unknown_url" if error.status_code == 404 else None)
    )
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return error_response(HttpError(499, f"the client left: {type(error).__name__}", "cancelled"))


async def _on_crash(_: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so the server logs it with its trace.
    return error_response(InternalError(f"internal error: {type(error).__name__}"))
