"""The front process: AsyncLLM behind the frames of an engine process."""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ^ vLLM lives in an environment of its own.

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus_core.block_keys import root_key
from isthmus_core.errors import (
    InternalError,
    IsthmusError,
    Overloaded,
    RequestCancelled,
    ScheduleUnsupported,
    StartError,
)
from isthmus_core.framing import AsyncFrameSocket
from isthmus_worker.engine import EngineDescription, EngineLoad, EngineRequest
from isthmus_worker.engine_process.frames import commands_from_bytes, events_to_bytes
from isthmus_worker.scheduler.events import ContextDone, RequestFinished, RequestReleased
from isthmus_worker.scheduler.limits import Limits
from isthmus_worker.vllm_engine.arguments import engine_arguments
from isthmus_worker.vllm_engine.block_keys import BlockKeys, salt_text
from isthmus_worker.vllm_engine.event_reader import EventReader
from isthmus_worker.vllm_engine.model import ModelIdentity
from isthmus_worker.vllm_engine.outputs import LegOutput
from isthmus_worker.vllm_engine.sampling import first_tokens, hands_off, sampling_arguments
from isthmus_worker.wire.engine_frames import Abort, Stop
from kvtransfer.integrations.vllm.params import DecodeLeg, decode_params, prefill_params

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from isthmus_core.keys import RequestKey

logger = logging.getLogger(__name__)

# Load is told at most this often while there is work.
_LOAD_S = 0.2


class Front:
    """One engine. `run` serves the hub until it says stop or is gone."""

    def __init__(self, config: IsthmusConfig, identity: ModelIdentity, frames: AsyncFrameSocket) -> None:
        self._config, self._identity, self._frames = config, identity, frames
        self._legs: dict[RequestKey, asyncio.Task[None]] = {}
        self._load = self._told = EngineLoad()
        self._pending: list[Any] = []
        self._engine: Any = None
        self._limits: Limits | None = None
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Raises StartError, and whatever ends vLLM."""
        with tempfile.TemporaryDirectory(prefix="isthmus-vllm-") as folder:
            endpoint = f"ipc://{Path(folder) / 'events'}"
            description = self._start(endpoint)
            events = EventReader(endpoint, self._block_keys(description), self._emit, self._end)
            if self._config.engine.prefix_caching:
                events.start()
            tasks = [asyncio.create_task(self._serve()), asyncio.create_task(self._tell_load())]
            try:
                self._emit(description)
                done, _ = await asyncio.wait((*tasks, self._failed), return_when=asyncio.FIRST_COMPLETED)
                for one in done:
                    one.result()
            finally:
                for task in (*tasks, *self._legs.values()):
                    task.cancel()
                await events.close()
                self._engine.shutdown(timeout=1.0)

    def _start(self, endpoint: str) -> EngineDescription:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.metrics.loggers import StatLoggerBase

        front = self

        class LoadReader(StatLoggerBase):
            """Hands every step's numbers to the front."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                """Nothing to keep."""

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
                if scheduler_stats is not None:
                    front.note_load(scheduler_stats)

            def log_engine_initialized(self) -> None:
                """Nothing to say."""

        identity = self._identity
        arguments = engine_arguments(
            self._config,
            weights_digest=identity.weights_digest,
            attention_digest=identity.attention_digest,
            events_endpoint=endpoint,
        )
        try:
            engine_args = AsyncEngineArgs(**arguments)
        except TypeError as error:
            raise StartError(f"engine.vllm: {error}") from error
        self._engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[LoadReader])
        config = self._engine.vllm_config
        wanted, block = self._config.engine.vllm.get("block_size"), config.cache_config.block_size
        if wanted is not None and wanted != block:
            raise StartError(f"engine.vllm.block_size = {wanted}: vLLM made it {block}; write that, or leave it out")
        description = EngineDescription(
            name="vllm",
            max_model_len=config.model_config.max_model_len,
            tokens_per_block=block,
            total_blocks=config.cache_config.num_gpu_blocks - 1,  # one stands for tokens nobody needs
            vocab_size=config.model_config.get_vocab_size(),
            weights_digest=identity.weights_digest,
            attention_digest=identity.attention_digest,
            kv_dtype=identity.kv_dtype(config),
        )
        self._load = self._told = EngineLoad(total_blocks=description.total_blocks)
        self._limits = Limits(
            role=self._config.worker.role,
            vocab_size=description.vocab_size,
            max_model_len=description.max_model_len,
            tokens_per_block=block,
            num_blocks=description.total_blocks,
            max_running=config.scheduler_config.max_num_seqs,
            max_batch_tokens=config.scheduler_config.max_num_batched_tokens,
            max_waiting=self._config.engine.max_waiting,
        )
        return description

    def _block_keys(self, description: EngineDescription) -> BlockKeys:
        def root(salt: bytes, adapter: str) -> bytes:
            return root_key(
                weights_digest=description.weights_digest,
                attention_digest=description.attention_digest,
                kv_dtype=description.kv_dtype,
                adapter=adapter,
                salt=salt,
            )

        return BlockKeys(root, description.tokens_per_block)

    # --- the hub

    async def _serve(self) -> None:
        while (frame := await self._frames.recv()) is not None:
            for command in commands_from_bytes(frame):
                match command:
                    case EngineRequest():
                        self._submit(command)
                    case Abort(key):
                        if key in self._legs:
                            self._legs[key].cancel()
                    case Stop():
                        return
                    case _:
                        raise InternalError(f"{type(command).__name__} is for the scheduler of vLLM, not for its front")

    def _submit(self, request: EngineRequest) -> None:
        if request.key in self._legs:
            raise InternalError(f"the hub submitted request {request.key} while it is live")
        task = asyncio.create_task(self._run_leg(request), name=f"leg {request.key}")
        self._legs[request.key] = task
        task.add_done_callback(lambda done: self._over(request.key, done))

    def _over(self, key: RequestKey, task: asyncio.Task[None]) -> None:
        del self._legs[key]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """vLLM can not go on: the process ends, and its hub says why."""
        if not self._failed.done():
            self._failed.set_exception(error)

    async def _run_leg(self, request: EngineRequest) -> None:
        output, offered = LegOutput(request), False
        try:
            params = self._params(request)
            prompt: dict[str, Any] = {"prompt_token_ids": [*request.prompt, *first_tokens(request)]}
            if (salt := salt_text(request.cache_salt)) is not None:
                prompt["cache_salt"] = salt
            name = f"{request.key.request_id}.{request.key.attempt}"
            async with aclosing(self._engine.generate(prompt, params, name)) as stream:
                async for said in stream:
                    for event in output.events(said):
                        offered |= isinstance(event, ContextDone)
                        self._emit(event)
        except asyncio.CancelledError:
            self._emit(output.failed(RequestCancelled()))
        except IsthmusError as error:
            self._emit(RequestFinished(request.key, error, output.report()))
        if not offered:
            # Otherwise the hub knows when its blocks are free.
            self._emit(RequestReleased(request.key))

    def _params(self, request: EngineRequest) -> Any:
        """Raises IsthmusError when the request can not be taken."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._limits is None:
            raise InternalError("a request before the engine has started")
        if request.context is not None or request.generation_waits:
            raise ScheduleUnsupported(self._config.worker.instance_id or "vLLM", "vLLM takes one leg after the other")
        self._limits.check(request)
        if self._load.waiting_requests >= self._config.engine.max_waiting:
            raise Overloaded("the queue of the engine", self._config.engine.max_waiting)
        arguments = sampling_arguments(request)
        phase = request.context_phase
        if phase is not None:
            leg = DecodeLeg(request.key, phase.holder, phase.prompt_tokens, request.trace)
            arguments["extra_args"] = {"kv_transfer_params": decode_params(leg)}
        elif hands_off(request):
            arguments["extra_args"] = {"kv_transfer_params": prefill_params(request.key)}
        return SamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)

    # --- to the hub

    def _emit(self, message: Any) -> None:
        """Everything of one turn of the loop leaves as one frame."""
        if not self._pending:
            asyncio.get_running_loop().call_soon(self._flush)
        self._pending.append(message)

    def _flush(self) -> None:
        messages, self._pending = self._pending, []
        try:
            self._frames.send(events_to_bytes(messages))
        except ConnectionError:
            logger.info("the hub is gone")

    def note_load(self, stats: Any) -> None:
        """What vLLM counted in a step."""
        total = self._load.total_blocks
        self._load = replace(
            self._load,
            running_requests=stats.num_running_reqs,
            waiting_requests=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            used_blocks=round(stats.kv_cache_usage * total),
        )

    async def _tell_load(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_S)
            if self._engine.errored:
                raise self._engine.dead_error
            if self._load != self._told:
                self._told = self._load
                self._emit(self._load)


async def serve(config: IsthmusConfig, identity: ModelIdentity, fd: int) -> None:
    """Until the hub says stop or is gone."""
    frames = await AsyncFrameSocket.open(socket.socket(fileno=fd))
    await Front(config, identity, frames).run()
