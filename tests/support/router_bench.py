"""A router's pipeline over fakes: scripted workers, a coordinator that remembers."""

from __future__ import annotations

from contextlib import aclosing

from isthmus_core.config import TelemetryConfig
from isthmus_core.tracing import Tracing
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.pipeline import Pipeline
from isthmus_router.ports import LegKind
from isthmus_router.requests import End, GenerateRequest, Part
from isthmus_router.rules import Rules
from router_fakes import FakeCoordinator, FakeWorkers


class PipelineBench:
    """`coordinator`: what `FakeCoordinator` takes."""

    def __init__(
        self, rules: Rules, tracing: Tracing | None = None, *, max_text_bytes: int = 200_000, **coordinator: object
    ) -> None:
        self.coordinator = FakeCoordinator(**coordinator)  # type: ignore[arg-type]
        self.workers = FakeWorkers()
        self.pipeline = Pipeline(
            self.coordinator,
            self.workers,
            {"m": ByteTokenizer()},
            tracing or Tracing.from_config(TelemetryConfig(), "test"),
            max_text_bytes=max_text_bytes,
            rules=rules,
        )

    def script(self, kind: LegKind, *steps: object) -> None:
        """What a leg of that kind does."""
        self.workers.scripts[kind] = list(steps)  # type: ignore[arg-type]

    async def answer(self, request: GenerateRequest) -> list[Part | End]:
        """Everything that a request gives."""
        async with aclosing(self.pipeline.generate(request)) as parts:
            return [part async for part in parts]
