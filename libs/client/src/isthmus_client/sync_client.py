"""The client for programs without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from isthmus_client.client import Client, Model
from isthmus_client.generation import Answer, Message, Options, Part, Prompt
from isthmus_core.config import TlsConfig

T = TypeVar("T")


class SyncClient:
    """`Client` for programs without an event loop: it owns one on a thread. Use it as a context manager."""

    def __init__(
        self, endpoint: str = "127.0.0.1:50051", *, tls: TlsConfig | None = None, api_key: str | None = None
    ) -> None:
        self._endpoint, self._tls, self._api_key = endpoint, tls, api_key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="isthmus-client", daemon=True)
        self._client: Client | None = None

    def __enter__(self) -> SyncClient:
        self._thread.start()
        self._client = self._run(self._open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._run(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> Client:
        return Client(
            self._endpoint, tls=self._tls, api_key=self._api_key
        )  # channels belong to the loop they are made on

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def _opened(self) -> Client:
        if self._client is None:
            raise RuntimeError("SyncClient is not open: use it as `with SyncClient(...) as client`")
        return self._client

    def generate(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Iterator[Part]:
        """Stream the answers."""
        parts = self._opened.generate(prompt, timeout_s=timeout_s, **options)

        async def following() -> Part | None:
            return await anext(parts, None)

        try:
            while (part := self._run(following())) is not None:
                yield part
        finally:
            self._run(_ended(parts))

    def answer(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> Answer:
        """The whole answer at once."""
        return self._run(self._opened.answer(prompt, timeout_s=timeout_s, **options))

    def answers(self, prompt: Prompt, *, timeout_s: float | None = None, **options: Unpack[Options]) -> list[Answer]:
        """All `n` answers, whole."""
        return self._run(self._opened.answers(prompt, timeout_s=timeout_s, **options))

    def tokenize(self, prompt: str | Sequence[Message], *, model: str = "") -> list[int]:
        """Token ids of text or messages, as `generate` would make them."""
        return self._run(self._opened.tokenize(prompt, model=model))

    def detokenize(self, ids: Sequence[int], *, model: str = "") -> str:
        """Text of token ids."""
        return self._run(self._opened.detokenize(ids, model=model))

    def list_models(self) -> list[Model]:
        """Models that can be asked for now."""
        return self._run(self._opened.list_models())


async def _ended(parts: AsyncGenerator[Part, None]) -> None:
    await parts.aclose()
