"""The parent's own HTTP: health and metrics of the whole fleet, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from isthmus_core.metrics.prometheus import render
from isthmus_router.fleet.status import Status, health

logger = logging.getLogger(__name__)


def make_control_app(
    children: Callable[[], Sequence[tuple[str, Status | None]]],
    registry: CollectorRegistry,
    draining: Callable[[], bool],
    drain: Callable[[], None],
) -> Starlette:
    """GET /health: 200 while a child serves. GET /metrics: of all children, each sample with its process. POST /drain:
    no new requests, the running ones may end, then the fleet leaves; the same as SIGTERM."""

    async def get_health(_: Request) -> Response:
        status, body = health(children(), draining=draining())
        return JSONResponse(body, status, {} if status == 200 else {"retry-after": "1"})

    async def get_metrics(_: Request) -> Response:
        # It asks every child over HTTP.
        return PlainTextResponse(await asyncio.to_thread(render, registry), media_type="text/plain; version=0.0.4")

    async def post_drain(request: Request) -> Response:
        logger.info("asked to drain by %s", request.client.host if request.client else "somebody")
        drain()
        return JSONResponse({"status": "draining"}, 202)

    return Starlette(
        routes=[
            Route("/health", get_health, methods=["GET"]),
            Route("/metrics", get_metrics, methods=["GET"]),
            Route("/drain", post_drain, methods=["POST"]),
        ]
    )
