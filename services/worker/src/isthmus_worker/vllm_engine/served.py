"""vLLM as a server: a plain `vllm serve` as child of the front, asked by HTTP.

    front ──POST /inference/v1/generate (token ids in, token ids out)──▶ vllm serve ◀── its users, on its own port
          ──GET /metrics (load, once a second)─────────────────────────▶

The connector in its processes talks to the hub as that of the library does: nothing of a hand-off goes this way.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import TYPE_CHECKING, Any, cast

import httpx

from isthmus_core.errors import StartError
from isthmus_worker.vllm_engine.block_keys import salt_text
from isthmus_worker.vllm_engine.sampling import hands_off, sampling_arguments, transfer_params
from isthmus_worker.vllm_engine.serve_command import serve_command
from isthmus_worker.vllm_engine.served_answers import Answers, metric_values, refusal, whole
from isthmus_worker.vllm_engine.vllm_port import VllmFacts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.engine import EngineRequest
    from isthmus_worker.vllm_engine.model import ModelIdentity
    from isthmus_worker.vllm_engine.vllm_port import Note

_GENERATE = "/inference/v1/generate"
_COUNT_S = 1.0
_GRACE_S = 15.0
# What an instance is taken to run at once where engine.vllm.max_num_seqs does not say it.
_MAX_NUM_SEQS = 128
# The kernel ends the server with the front; the request for it outlives exec.
_CHILD = (
    "import os, sys; from isthmus_core.process import die_with_parent; die_with_parent(int(sys.argv[1])); "
    "os.execvp(sys.argv[2], sys.argv[2:])"
)


class VllmServed:
    """See `Vllm`. `events`: endpoint that vLLM publishes its KV events at."""

    def __init__(self, config: IsthmusConfig, identity: ModelIdentity, events: str, note: Note) -> None:
        self._config, self._identity, self._note = config, identity, note
        self._command = serve_command(config, identity, events)
        key = self._command.api_key
        self._http = httpx.AsyncClient(
            base_url=self._command.url,
            headers={"authorization": f"Bearer {key}"} if key else None,
            # A prompt may wait and take as long as it likes: the router's deadline cancels it.
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None),
            trust_env=False,
        )
        self._child: asyncio.subprocess.Process | None = None
        self._counted = 0.0

    async def start(self) -> VllmFacts:
        """As `Vllm`."""
        argv = (sys.executable, "-c", _CHILD, str(os.getpid()), *self._command.argv)
        self._child = await asyncio.create_subprocess_exec(*argv, stdin=asyncio.subprocess.DEVNULL)
        while not await self._healthy():
            if self._child.returncode is not None:
                raise StartError(f"engine.serve: the server ended with code {self._child.returncode}; see its log")
            await asyncio.sleep(0.2)
        models = (await self._http.get("/v1/models")).json()
        found = metric_values((await self._http.get("/metrics")).text)
        cache = found.labels
        if not cache:
            raise StartError("engine.serve: the server's /metrics say nothing of its cache; leave them on")
        return VllmFacts(
            max_model_len=int(models["data"][0]["max_model_len"]),
            tokens_per_block=int(cache["block_size"]),
            total_blocks=int(cache["num_gpu_blocks"]) - 1,
            vocab_size=_vocab_size(self._command.model),
            kv_dtype=self._identity.kv_dtype(cache["cache_dtype"], self._config.model.dtype),
            max_running=int(self._config.engine.vllm.get("max_num_seqs", _MAX_NUM_SEQS)),
        )

    async def _healthy(self) -> bool:
        try:
            return (await self._http.get("/health")).status_code == 200
        except httpx.TransportError:
            return False

    async def generate(
        self, request: EngineRequest, ids: list[int], answer: int, name: str, *, alone: bool
    ) -> AsyncGenerator[Any, None]:
        """As `Vllm`. Closing the connection aborts the request there."""
        in_one = hands_off(request) and not alone  # only a whole answer says that the blocks are offered
        body = request_body(request, ids, answer, name, alone=alone)
        body |= {"model": request.adapter or self._config.model.served_name, "stream": not in_one}
        if in_one:
            said = await self._http.post(_GENERATE, json=body)
            if said.status_code != 200:
                raise refusal(said.status_code, said.text)
            yield whole(said.json())
            return
        body["stream_options"] = {"include_usage": True}
        answers = Answers()
        async with self._http.stream("POST", _GENERATE, json=body) as stream:
            if stream.status_code != 200:
                raise refusal(stream.status_code, (await stream.aread()).decode(errors="replace"))
            async for line in stream.aiter_lines():
                for one in answers.line(line):
                    yield one

    async def check(self) -> None:
        """As `Vllm`; also counts."""
        if self._child is not None and self._child.returncode is not None:
            raise StartError(f"engine.serve: the server ended with code {self._child.returncode}")
        now = asyncio.get_running_loop().time()
        if now - self._counted >= _COUNT_S:
            self._counted = now
            try:
                found = metric_values((await self._http.get("/metrics")).text)
            except httpx.TransportError:
                return  # ending, or too busy: the next second tells
            self._note(found.running, found.waiting, found.usage)

    async def close(self) -> None:
        """As `Vllm`."""
        await self._http.aclose()
        if self._child is None or self._child.returncode is not None:
            return
        self._child.terminate()
        try:
            async with asyncio.timeout(_GRACE_S):
                await self._child.wait()
        except TimeoutError:
            self._child.kill()
            await self._child.wait()


def request_body(request: EngineRequest, ids: list[int], answer: int, name: str, *, alone: bool) -> dict[str, Any]:
    """Of vLLM's tokens-in-tokens-out API. `alone`: nothing is handed off."""
    body: dict[str, Any] = {
        "request_id": name,
        "token_ids": ids,
        "sampling_params": sampling_arguments(request, answer),
    }
    if (salt := salt_text(request.cache_salt)) is not None:
        body["cache_salt"] = salt
    if not alone and (transfer := transfer_params(request, answer)) is not None:
        body["kv_transfer_params"] = transfer
    return body


def _vocab_size(model: Path) -> int:
    """Of the model's own settings: the server does not say."""
    settings = cast("dict[str, Any]", json.loads((model / "config.json").read_text()))
    size = settings.get("vocab_size", settings.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise StartError(f"{model / 'config.json'}: has no vocab_size")
    return size
