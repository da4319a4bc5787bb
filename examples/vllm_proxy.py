"""The smallest proxy that splits a request over two `vllm serve`: prefill first, then decode with what it answered.

    python examples/vllm_proxy.py --prefill http://127.0.0.1:7201 --decode http://127.0.0.1:7202 --port 8100

Any proxy for vLLM's disaggregated prefilling does the same; this one shows what must be carried: kv_transfer_params.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

# What belongs to the answer, not to the prefill.
_ONLY_DECODE = ("stream", "stream_options", "max_completion_tokens", "min_tokens", "n")


def build(prefill: str, decode: str) -> Starlette:
    """The application. `prefill`, `decode`: base URLs."""
    http = httpx.AsyncClient(timeout=600)

    async def complete(request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        first = {name: value for name, value in body.items() if name not in _ONLY_DECODE}
        first |= {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = await http.post(f"{prefill}{request.url.path}", json=first)
        if answer.status_code != 200:
            return JSONResponse(answer.json(), answer.status_code)
        # None when the first token has ended the answer: then the decode computes it all.
        body["kv_transfer_params"] = answer.json().get("kv_transfer_params")
        if not body.get("stream"):
            done = await http.post(f"{decode}{request.url.path}", json=body)
            return JSONResponse(done.json(), done.status_code)

        async def pieces() -> AsyncIterator[bytes]:
            async with http.stream("POST", f"{decode}{request.url.path}", json=body) as stream:
                async for piece in stream.aiter_bytes():
                    yield piece

        return StreamingResponse(pieces(), media_type="text/event-stream")

    paths = ("/v1/completions", "/v1/chat/completions")
    return Starlette(routes=[Route(path, complete, methods=["POST"]) for path in paths])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="Split requests over a prefill and a decode server.")
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument("--port", type=int, default=8100)
    options = parser.parse_args()
    uvicorn.run(build(options.prefill, options.decode), host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
