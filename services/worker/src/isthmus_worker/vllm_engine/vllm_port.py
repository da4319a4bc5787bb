"""What the front needs of vLLM, whether that is a library in this process or a `vllm serve` of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from isthmus_worker.engine import EngineRequest

    # Requests running, requests waiting, share of the KV blocks in use.
    Note = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """Sizes that vLLM has settled on. `total_blocks`: without the one that stands for tokens nobody needs."""

    max_model_len: int
    tokens_per_block: int
    total_blocks: int
    vocab_size: int
    kv_dtype: str
    max_running: int


class Vllm(Protocol):
    """One engine."""

    async def start(self) -> VllmFacts:
        """Load the model. Raises StartError or ConfigError."""
        ...

    def generate(
        self, request: EngineRequest, ids: list[int], answer: int, name: str, *, alone: bool
    ) -> AsyncGenerator[Any, None]:
        """One request of vLLM for answer `answer`, going on behind `ids`: objects with `outputs` (each `token_ids`,
        `logprobs`, `finish_reason`), `num_cached_tokens` and `kv_transfer_params`, with the tokens that are new.
        `alone`: nothing is handed off. Closing it aborts. Raises InvalidRequest for what vLLM refuses."""
        ...

    async def check(self) -> None:
        """Raises what has ended vLLM."""
        ...

    async def close(self) -> None:
        """End it."""
        ...
