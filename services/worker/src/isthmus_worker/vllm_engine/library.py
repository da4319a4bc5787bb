"""vLLM as a library: AsyncLLM in the front's own process."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ^ vLLM lives in an environment of its own.

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from isthmus_core.errors import InvalidRequest, StartError
from isthmus_worker.vllm_engine.arguments import engine_arguments
from isthmus_worker.vllm_engine.block_keys import salt_text
from isthmus_worker.vllm_engine.load_reader import load_reader
from isthmus_worker.vllm_engine.sampling import sampling_arguments, transfer_params
from isthmus_worker.vllm_engine.vllm_port import VllmFacts

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.engine import EngineRequest
    from isthmus_worker.vllm_engine.model import ModelIdentity
    from isthmus_worker.vllm_engine.vllm_port import Note


class VllmLibrary:
    """See `Vllm`. `events`: endpoint that vLLM publishes its KV events at."""

    def __init__(self, config: IsthmusConfig, identity: ModelIdentity, events: str, note: Note) -> None:
        self._config, self._identity, self._events, self._note = config, identity, events, note
        self._engine: Any = None

    async def start(self) -> VllmFacts:
        """As `Vllm`."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            engine_args = AsyncEngineArgs(**engine_arguments(self._config, self._identity, self._events))
        except TypeError as error:
            raise StartError(f"engine.vllm: {error}") from error
        self._engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[load_reader(self._count)])
        config = self._engine.vllm_config
        return VllmFacts(
            max_model_len=config.model_config.max_model_len,
            tokens_per_block=config.cache_config.block_size,
            total_blocks=config.cache_config.num_gpu_blocks - 1,
            vocab_size=config.model_config.get_vocab_size(),
            kv_dtype=self._identity.kv_dtype(config.cache_config.cache_dtype, config.model_config.dtype),
            max_running=config.scheduler_config.max_num_seqs,
        )

    async def generate(
        self, request: EngineRequest, ids: list[int], answer: int, name: str, *, alone: bool
    ) -> AsyncGenerator[Any, None]:
        """As `Vllm`."""
        prompt: dict[str, Any] = {"prompt_token_ids": ids}
        if (salt := salt_text(request.cache_salt)) is not None:
            prompt["cache_salt"] = salt
        try:
            params = _params(request, answer, alone=alone)
            said = self._engine.generate(prompt, params, name, lora_request=self._adapter(request.adapter))
            async with aclosing(said) as stream:
                async for one in stream:
                    yield one
        except ValueError as error:
            raise InvalidRequest("request", "refused by vLLM", str(error)) from error

    async def check(self) -> None:
        """As `Vllm`."""
        if self._engine.errored:
            raise self._engine.dead_error

    async def close(self) -> None:
        """As `Vllm`."""
        if self._engine is not None:
            self._engine.shutdown(timeout=1.0)

    def _adapter(self, name: str) -> Any:
        from vllm.lora.request import LoRARequest

        found = next((one for one in self._identity.adapters if one.name == name), None)
        return None if found is None else LoRARequest(found.name, found.number, str(found.path))

    def _count(self, stats: Any) -> None:
        """What vLLM counted in a step."""
        self._note(
            stats.num_running_reqs, stats.num_waiting_reqs + stats.num_skipped_waiting_reqs, stats.kv_cache_usage
        )


def _params(request: EngineRequest, answer: int, *, alone: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    arguments = sampling_arguments(request, answer)
    if not alone and (transfer := transfer_params(request, answer)) is not None:
        arguments["extra_args"] = {"kv_transfer_params": transfer}
    return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)
