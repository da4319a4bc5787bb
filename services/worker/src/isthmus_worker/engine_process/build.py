"""From the configuration to the parts of an engine process: the runner, the cache, the scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.errors import ConfigError, IsthmusError, StartError
from isthmus_worker.cache import BlockManager
from isthmus_worker.engine import EngineDescription
from isthmus_worker.scheduler import Handoffs, Limits, Scheduler

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.engine_process.outbox import Outbox
    from isthmus_worker.runner import ModelDescription, ModelRunner
    from isthmus_worker.scheduler import Transceiver
    from kvtransfer.page_table import PageTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner that is warm, and the memory it computes in."""

    runner: ModelRunner
    description: ModelDescription
    num_blocks: int
    page_table: PageTable


def load_model(config: IsthmusConfig) -> LoadedModel:
    """Loads the model, allocates its cache and warms it up. Raises ConfigError or StartError with the reason."""
    try:
        runner = _runner(config)
        description = runner.describe()
        num_blocks = cache_blocks(config, description)
        page_table = runner.allocate_cache(num_blocks)
        runner.warm_up()
    except IsthmusError as error:
        raise StartError(error.message) from error
    logger.info(
        "model loaded",
        extra={"model": description.name, "blocks": num_blocks, "bytes_per_block": description.bytes_per_block},
    )
    return LoadedModel(runner, description, num_blocks, page_table)


def _runner(config: IsthmusConfig) -> ModelRunner:
    engine = config.engine
    if engine.kind == "mock":
        from isthmus_worker.mock_engine import MockRunner

        return MockRunner(engine.mock, config.model.served_name, engine.tokens_per_block, engine.max_model_len)
    if config.model.path is None:
        raise ConfigError("model.path is not set: engine.kind = torch needs the folder of a model")
    try:
        import torch

        from isthmus_worker.torch_engine import TorchRunner
    except ImportError as error:
        raise StartError(f"engine.kind = torch: {error}; pip install 'isthmus-worker[torch]'") from error
    if engine.num_threads is not None:
        torch.set_num_threads(engine.num_threads)
    return TorchRunner(
        config.model.path, config.model.dtype, engine.device, engine.tokens_per_block, engine.max_model_len
    )


def cache_blocks(config: IsthmusConfig, description: ModelDescription) -> int:
    """Blocks of the cache: engine.num_blocks, else what fits into engine.kv_cache_bytes. Raises ConfigError when that
    is not even one."""
    if config.engine.num_blocks is not None:
        return config.engine.num_blocks
    count = config.engine.kv_cache_bytes // description.bytes_per_block
    if count < 1:
        raise ConfigError(
            f"engine.kv_cache_bytes = {config.engine.kv_cache_bytes}: one block of "
            f"{config.engine.tokens_per_block} tokens takes {description.bytes_per_block} bytes"
        )
    return count


def describe_engine(config: IsthmusConfig, model: LoadedModel) -> EngineDescription:
    """What the hub is told once the engine can work."""
    about = model.description
    return EngineDescription(
        name=config.engine.kind,
        max_model_len=about.max_model_len,
        tokens_per_block=config.engine.tokens_per_block,
        total_blocks=model.num_blocks,
        vocab_size=about.vocab_size,
        weights_digest=about.weights_digest,
        attention_digest=about.attention_digest,
        kv_dtype=about.kv_dtype,
    )


def build_scheduler(
    config: IsthmusConfig, model: LoadedModel, outbox: Outbox, transceiver: Transceiver | None
) -> Scheduler:
    """The scheduler over an empty cache. `transceiver` is None on an instance that hands nothing off."""
    engine = config.engine
    limits = Limits(
        role=config.worker.role,
        vocab_size=model.description.vocab_size,
        max_model_len=model.description.max_model_len,
        tokens_per_block=engine.tokens_per_block,
        num_blocks=model.num_blocks,
        max_running=engine.max_running,
        max_batch_tokens=engine.max_batch_tokens,
        max_waiting=engine.max_waiting,
    )
    handoffs = None
    if transceiver is not None:
        handoffs = Handoffs(transceiver, len(model.page_table.groups), config.transfer.handoff_hold_s)
    return Scheduler(limits, BlockManager(model.num_blocks, engine.tokens_per_block), outbox.emit, handoffs)
