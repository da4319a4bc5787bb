"""An engine behind OpenAI's API that costs next to nothing: for routers that send HTTP on (sglang-router).

    python benchmarks/sse_mock.py PORT MODEL [STEP_US]

Every completion is `max_tokens` events of one character, a step apart (all at once for 0), whatever the prompt says.
"""

from __future__ import annotations

import asyncio
import json
import sys

import uvloop

_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    """A piece of a streamed body."""
    return b"%x\r\n%s\r\n" % (len(data), data)


class Engine:
    """One model. `step_s`: seconds between two tokens."""

    def __init__(self, model: str, step_s: float) -> None:
        self._model, self._step_s = model, step_s
        choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
        event = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": model, "choices": [choice]}
        self._event = chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        models = {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "mock"}]}
        about = {"model_path": model, "served_model_name": model, "is_generation": True, "status": "ready"}
        self._answers = {"/v1/models": models}
        self._about = about

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, kept alive."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                path = head[0].split(" ")[1].split("?")[0]
                fields = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                if path == "/v1/completions":
                    await self._stream(writer, json.loads(body)["max_tokens"])
                else:
                    data = json.dumps(self._answers.get(path, self._about)).encode()
                    writer.write(_JSON % (len(data), data))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # how a client leaves
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter, tokens: int) -> None:
        writer.write(_STREAM)
        for _ in range(tokens):
            if self._step_s:
                await asyncio.sleep(self._step_s)
            writer.write(self._event)
        writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    """Serve until killed."""
    port, model, *step_us = sys.argv[1:]
    engine = Engine(model, float(step_us[0]) * 1e-6 if step_us else 0.0)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
