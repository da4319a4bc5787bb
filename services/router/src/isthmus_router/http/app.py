"""The OpenAI endpoints, health and version."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from isthmus_core.config import ClientsConfig
from isthmus_core.errors import InternalError, InvalidRequest, IsthmusError, UnknownModel, shorten
from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from isthmus_core.tracing import parse_traceparent
from isthmus_router.affinity import SESSION_HEADER, TENANT_HEADER, check_session
from isthmus_router.clients import Caller, Gate
from isthmus_router.http.answers import ChatShape, CompletionShape, Shape
from isthmus_router.http.body import read_body
from isthmus_router.http.convert import Arrival, chat_input, chat_request, completion_requests
from isthmus_router.http.errors import HttpError, error_response
from isthmus_router.http.exchange import Answer
from isthmus_router.http.openapi import openapi_document
from isthmus_router.http.parse import parse_body, parse_keys
from isthmus_router.http.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationBody,
    TokenizeChatRequest,
    TokenizeTextRequest,
)
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import ServedModel
from isthmus_router.requests import ChatInput, GenerateRequest, TextInput, TokenInput


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client may send and how long it may take. `request_timeout_s`: longest deadline of a request;
    `client_timeout_s`: longest time to send a request or to take a piece of its answer; `tenant_header`: who asks."""

    max_body_bytes: int
    request_timeout_s: float
    client_timeout_s: float
    tenant_header: str = TENANT_HEADER


MAX_LABEL_CHARS = 200
TIMEOUT_HEADER = "x-request-timeout"


class Endpoints:
    """The handlers. `limits`: what a client may send and how long it may take; `gate`: who may ask."""

    def __init__(self, pipeline: Pipeline, limits: Limits, gate: Gate) -> None:
        self._pipeline = pipeline
        self._limits = limits
        self._gate = gate
        self._started = int(time.time())

    async def chat_completions(self, request: Request) -> Answer:
        """`POST /v1/chat/completions`."""
        arrival = self._arrival(request)
        body = parse_body(ChatCompletionRequest, await self._body(request))
        shape = ChatShape(
            self._model_name(body.model), int(time.time()), logprobs=bool(body.logprobs), with_usage=body.include_usage
        )
        return self._answer([chat_request(body, arrival)], shape, body)

    async def completions(self, request: Request) -> Answer:
        """`POST /v1/completions`."""
        arrival = self._arrival(request)
        body = parse_body(CompletionRequest, await self._body(request))
        shape = CompletionShape(
            self._model_name(body.model),
            int(time.time()),
            logprobs=body.logprobs is not None,
            with_usage=body.include_usage,
        )
        return self._answer(completion_requests(body, arrival), shape, body)

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`: of a prompt or of messages."""
        self._enter(request)
        raw = await self._body(request)
        if parse_keys(raw).isdisjoint(("messages",)):
            body: TokenizeTextRequest | TokenizeChatRequest = parse_body(TokenizeTextRequest, raw)
            special = body.add_special_tokens is not False
            source: TextInput | ChatInput = TextInput(body.prompt, special=special)
        else:
            body = parse_body(TokenizeChatRequest, raw)
            source = chat_input(body)
        name, ids, tokenizer = await self._pipeline.tokenize(body.model, source)
        strings = None
        if body.return_token_strs:
            strings = [tokenizer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids]
        longest = next((model.max_model_len for model in self._pipeline.models() if model.name == name), None)
        return JSONResponse({"count": len(ids), "max_model_len": longest, "tokens": ids, "token_strs": strings})

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        self._enter(request)
        body = parse_body(DetokenizeRequest, await self._body(request))
        source = TokenInput(tuple(body.tokens), "tokens")
        text = await self._pipeline.detokenize(body.model, source, skip_special=False)
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> Response:
        """`GET /v1/models`."""
        self._enter(request)
        return JSONResponse({"object": "list", "data": [self._card(model) for model in self._pipeline.models()]})

    async def model(self, request: Request) -> Response:
        """`GET /v1/models/{name}`."""
        self._enter(request)
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

    async def openapi(self, _: Request) -> Response:
        """`GET /openapi.json`."""
        return JSONResponse(openapi_document())

    async def _body(self, request: Request) -> bytes:
        return await read_body(request, self._limits.max_body_bytes, self._limits.client_timeout_s)

    def _answer(self, requests: list[GenerateRequest], shape: Shape, body: GenerationBody) -> Answer:
        return Answer(
            self._pipeline,
            requests,
            shape,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            client_timeout_s=self._limits.client_timeout_s,
        )

    def _enter(self, request: Request) -> Caller:
        """Who asks. Raises Unauthenticated or RateLimited."""
        headers = request.headers
        return self._gate.enter(headers.get("authorization", ""), headers.get(self._limits.tenant_header, ""))

    def _arrival(self, request: Request) -> Arrival:
        """What the headers say. Raises Unauthenticated, RateLimited or InvalidRequest."""
        caller = self._enter(request)
        label = request.headers.get("x-request-id", "")
        if len(label) > MAX_LABEL_CHARS or not (label.isascii() and label.isprintable()):
            raise InvalidRequest("x-request-id", repr(shorten(label)), f"use up to {MAX_LABEL_CHARS} ASCII characters")
        traceparent = request.headers.get("traceparent")
        return Arrival(
            timeout_s=_timeout_s(request, self._limits.request_timeout_s),
            arrived=time.monotonic(),
            arrived_ns=time.time_ns(),
            request_id=_request_id(label),
            label=label,
            trace=None if traceparent is None else parse_traceparent(traceparent),
            session=check_session(request.headers.get(SESSION_HEADER, ""), SESSION_HEADER),
            tenant=caller.tenant,
            quota=caller.quota,
        )

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


def make_app(pipeline: Pipeline, limits: Limits, gate: Gate | None = None) -> Starlette:
    """The ASGI application over a pipeline. Without a gate everybody may ask."""
    endpoints = Endpoints(pipeline, limits, gate or Gate(ClientsConfig(), time.monotonic))
    routes = [
        Route("/v1/chat/completions", endpoints.chat_completions, methods=["POST"]),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/health", endpoints.health, methods=["GET"]),
        Route("/version", endpoints.version, methods=["GET"]),
        Route("/openapi.json", endpoints.openapi, methods=["GET"]),
    ]

    async def on_error(request: Request, error: Exception) -> Response:
        return _refusal(pipeline, request, error)

    handlers = {
        IsthmusError: on_error,
        HTTPException: on_error,
        ClientDisconnect: _on_disconnect,
        Exception: _on_crash,
    }
    return Starlette(routes=routes, exception_handlers=handlers)


def _request_id(label: str) -> int:
    """The request id that a client's name for its request is, or 0: any other name only labels the request."""
    if label.isascii() and label.isdigit() and len(label) <= 19 and MIN_GLOBAL_ID <= int(label) < MAX_GLOBAL_ID:
        return int(label)
    return 0


def _timeout_s(request: Request, longest_s: float) -> float:
    """Deadline that a client asks for, at most the configured one. Raises InvalidRequest."""
    asked = request.headers.get(TIMEOUT_HEADER)
    if asked is None:
        return longest_s
    try:
        seconds = float(asked)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidRequest(TIMEOUT_HEADER, repr(shorten(asked)), "send a number of seconds above 0")
    return min(seconds, longest_s)


def _refusal(pipeline: Pipeline, request: Request, error: Exception) -> Response:
    """What did not become an answer of the pipeline, which counts its own: counted and explained."""
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):
        message = f"{request.method} {request.url.path}: {error.detail}"
        code = "unknown_url" if error.status_code == 404 else None
        headers, error = error.headers, HttpError(error.status_code, message, code)
    if not isinstance(error, IsthmusError):
        raise error
    pipeline.refused(error)
    return error_response(error, headers)


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return error_response(HttpError(499, f"the client left: {type(error).__name__}", "cancelled"))


async def _on_crash(_: Request, error: Exception) -> Response:
    # Starlette raises the error again after this answer, so the server logs it with its trace.
    return error_response(InternalError(f"internal error: {type(error).__name__}"))
