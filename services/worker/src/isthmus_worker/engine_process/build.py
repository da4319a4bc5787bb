"""From the configuration and a loaded model to the scheduler of an engine process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.block_keys import root_key
from isthmus_core.errors import ConfigError
from isthmus_worker.cache import BlockManager, BlockTable
from isthmus_worker.cache.radix_cache import RadixCache
from isthmus_worker.engine import EngineDescription
from isthmus_worker.scheduler import Handoffs, Limits, Memory, Scheduler
from isthmus_worker.scheduler.front import Front
from kvtransfer.config import OnFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.cache.base import CacheManager
    from isthmus_worker.engine_process.load import LoadedModel
    from isthmus_worker.engine_process.outbox import Outbox
    from isthmus_worker.runner import ModelDescription
    from isthmus_worker.scheduler import SchedulerEvent, Transceiver
    from kvtransfer.transceiver.layer_progress import LayerProgress


def describe_engine(config: IsthmusConfig, model: LoadedModel) -> EngineDescription:
    """What the hub is told once the engine can work."""
    about = model.description
    return EngineDescription(
        name=config.engine.kind,
        max_model_len=about.max_model_len,
        tokens_per_block=config.engine.tokens_per_block,
        total_blocks=max(model.num_blocks) * config.parallel.data_parallel_size,
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
        max_held_requests=-(-transfer.max_held_requests // config.parallel.data_parallel_size),
        max_held_blocks=int(transfer.max_held_share * num_blocks),
        timeout_s=transfer.timeout_s,
    )


def build_front(
    config: IsthmusConfig, model: LoadedModel, outbox: Outbox, layers: LayerProgress | None = None
) -> Front:
    """The schedulers of all attention-dp groups, whose caches are empty. `layers`: prompts are sent layer by layer."""
    hands_off = config.worker.role != "context_and_generation"
    policy = handoff_policy(config, max(model.num_blocks))

    def make(emit: Callable[[SchedulerEvent], None], dp_rank: int) -> tuple[Scheduler, SchedulerTransceiver | None]:
        transceiver = SchedulerTransceiver(outbox, policy=policy) if hands_off else None
        return build_scheduler(config, model, emit, transceiver, dp_rank, layers), transceiver

    return Front(outbox.emit, config.parallel.data_parallel_size, make)


def build_scheduler(
    config: IsthmusConfig,
    model: LoadedModel,
    emit: Callable[[SchedulerEvent], None],
    transceiver: Transceiver | None,
    dp_rank: int = 0,
    layers: LayerProgress | None = None,
) -> Scheduler:
    """The scheduler of an attention-dp group over an empty cache. `transceiver` is None on an instance that hands
    nothing off."""
    engine, groups = config.engine, config.parallel.data_parallel_size
    if config.transfer.fill_gate > engine.max_running:
        raise ConfigError(
            f"transfer.fill_gate = {config.transfer.fill_gate}: no more than engine.max_running = "
            f"{engine.max_running} caches can be here at once; make one smaller or the other larger"
        )
    limits = Limits(
        role=config.worker.role if transceiver is None else "any",
        vocab_size=model.description.vocab_size,
        max_model_len=model.description.max_model_len,
        tokens_per_block=engine.tokens_per_block,
        num_blocks=max(model.num_blocks),
        max_running=-(-engine.max_running // groups),
        max_batch_tokens=-(-engine.max_batch_tokens // groups),
        max_waiting=-(-engine.max_waiting // groups),
        draft_tokens=engine.draft_tokens,
        fill_gate=-(-config.transfer.fill_gate // groups),
    )
    handoffs = None
    if transceiver is not None:
        transfer = config.transfer
        handoffs = Handoffs(
            transceiver,
            model.held[dp_rank],
            transfer.handoff_hold_s,
            dp_rank,
            reserve_early=transfer.reserve_early,
            layers=layers,
        )
    root = _block_root(model.description) if engine.prefix_caching else None
    memory = Memory(_cache_manager(config, model), root, limits.max_batch_tokens)
    return Scheduler(limits, memory, emit, handoffs)


def _cache_manager(config: IsthmusConfig, model: LoadedModel) -> CacheManager:
    size, windows = config.engine.tokens_per_block, model.description.windows
    if config.cache.manager == "radix":
        return RadixCache(model.num_blocks, windows, size)
    window = min((one for one in windows if one is not None), default=None)
    return BlockTable(BlockManager(model.num_blocks[0], size), window)


def _block_root(model: ModelDescription) -> Callable[[bytes], bytes]:
    """From a cache salt to the parent of first blocks."""
    return lambda salt: root_key(
        weights_digest=model.weights_digest,
        attention_digest=model.attention_digest,
        kv_dtype=model.kv_dtype,
        salt=salt,
    )
