"""From the configuration to the parts of an engine process: the runner, the cache, the scheduler."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_core.block_keys import root_key
from isthmus_core.errors import ConfigError, IsthmusError, StartError
from isthmus_worker.cache import BlockManager
from isthmus_worker.engine import EngineDescription
from isthmus_worker.scheduler import Handoffs, Limits, Memory, Scheduler
from kvtransfer.config import OnFailure
from kvtransfer.page_table import AttentionGroup
from kvtransfer.transceiver.policy import HandoffPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

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
        extra={
            "model": description.name,
            "blocks": num_blocks,
            "bytes_per_block": description.bytes_per_block,
            "attention": description.kernels,
        },
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
        config.model.path,
        config.model.dtype,
        engine.device,
        engine.tokens_per_block,
        engine.max_model_len,
        engine.attention,
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


def handoff_policy(config: IsthmusConfig, num_blocks: int) -> HandoffPolicy:
    """What the scheduler does about hand-offs that fail, and how much finished prefills may hold."""
    transfer = config.transfer
    return HandoffPolicy(
        retries=1,
        on_failure=OnFailure(transfer.on_transfer_failure),
        max_held_requests=transfer.max_held_requests,
        max_held_blocks=int(transfer.max_held_share * num_blocks),
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
        groups = model.page_table.groups
        windows = [one.sliding_window for one in groups if isinstance(one, AttentionGroup) and one.sliding_window]
        handoffs = Handoffs(transceiver, len(groups), config.transfer.handoff_hold_s, min(windows, default=None))
    memory = Memory(
        BlockManager(model.num_blocks, engine.tokens_per_block),
        _block_root(model.description) if engine.prefix_caching else None,
    )
    return Scheduler(limits, memory, outbox.emit, handoffs)


def _block_root(model: ModelDescription) -> Callable[[bytes], bytes]:
    """From a cache salt to the parent of first blocks."""
    return lambda salt: root_key(
        weights_digest=model.weights_digest,
        attention_digest=model.attention_digest,
        kv_dtype=model.kv_dtype,
        salt=salt,
    )
