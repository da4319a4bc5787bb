"""`/openapi.json`: the HTTP surface, described from the same schemas that check the bodies."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic.json_schema import models_json_schema

from isthmus_router.http.fields import Body
from isthmus_router.http.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeTextRequest,
)

_PREFIX = "#/components/schemas/"
_POSTS: dict[str, tuple[str, tuple[type[Body], ...]]] = {
    "/v1/chat/completions": ("Answers a conversation.", (ChatCompletionRequest,)),
    "/v1/completions": ("Continues texts or token ids.", (CompletionRequest,)),
    "/tokenize": ("Token ids of a text or a conversation.", (TokenizeTextRequest, TokenizeChatRequest)),
    "/detokenize": ("Text of token ids.", (DetokenizeRequest,)),
}
_GETS = {
    "/v1/models": "Models that can be asked for now.",
    "/health": "Whether a request can be served now.",
    "/version": "Version of the router.",
    "/openapi.json": "This document.",
}
_STREAMING = ("/v1/chat/completions", "/v1/completions")
_HEADERS = {
    "x-request-id": ("name of the request; comes back with the answer", {"type": "string", "maxLength": 200}),
    "x-session-id": ("name of the conversation, for placement", {"type": "string", "maxLength": 256}),
    "x-request-timeout": ("seconds that the request may take", {"type": "number", "exclusiveMinimum": 0}),
}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


@cache
def openapi_document() -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    bodies = [body for _, kinds in _POSTS.values() for body in kinds]
    _, schemas = models_json_schema([(body, "validation") for body in bodies], ref_template=_PREFIX + "{model}")
    paths: dict[str, Any] = {path: {"get": _operation(summary)} for path, summary in _GETS.items()}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"] = {"get": {**_operation("One model."), "parameters": [name]}}
    for path, (summary, kinds) in _POSTS.items():
        paths[path] = {"post": _post(path, summary, kinds)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Isthmus", "version": version("isthmus-router")},
        "paths": paths,
        "components": {"schemas": {**schemas["$defs"], "Error": _ERROR}},
    }


def _operation(summary: str) -> dict[str, Any]:
    error = {"description": "why not", "content": {"application/json": {"schema": {"$ref": _PREFIX + "Error"}}}}
    answer = {"description": "the answer", "content": {"application/json": {"schema": {"type": "object"}}}}
    return {"summary": summary, "responses": {"200": answer, "default": error}}


def _post(path: str, summary: str, kinds: tuple[type[Body], ...]) -> dict[str, Any]:
    operation = _operation(summary)
    refs = [{"$ref": _PREFIX + kind.__name__} for kind in kinds]
    schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if path in _STREAMING:
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        operation["parameters"] = [
            {"name": header, "in": "header", "description": text, "schema": schema}
            for header, (text, schema) in _HEADERS.items()
        ]
    return operation
