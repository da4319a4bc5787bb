"""From the configuration to a model in memory: alone, as the first rank of an instance, or as another one of them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from isthmus_core.errors import ConfigError, IsthmusError, StartError
from isthmus_worker.cache.layout import CacheOptions
from isthmus_worker.cache.sizes import cache_blocks
from isthmus_worker.parallel.follower import Follower
from isthmus_worker.parallel.leader import LeaderRunner
from isthmus_worker.parallel.links import RankLinks, RankLost
from isthmus_worker.parallel.shard import topology_of
from isthmus_worker.scheduler import Held
from isthmus_worker.settings import engine_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from isthmus_core.config import IsthmusConfig
    from isthmus_core.framing import FrameSocket
    from isthmus_worker.parallel.leader import RankRunner
    from isthmus_worker.runner import ModelDescription, ModelRunner
    from kvtransfer.page_table import PageTable
    from kvtransfer.transceiver.layer_progress import LayerProgress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A runner that is warm, and the memory of this rank that it computes in. `num_blocks` of each block list. `held`:
    for each attention-dp group, the layer groups of its ranks."""

    runner: ModelRunner
    description: ModelDescription
    num_blocks: tuple[int, ...]
    page_table: PageTable
    held: tuple[tuple[Held, ...], ...]


def load_model(
    config: IsthmusConfig, others: Sequence[FrameSocket] = (), layers: LayerProgress | None = None
) -> LoadedModel:
    """Loads the model, allocates its cache and warms it up, together with the `others` of an instance that is spread
    over ranks. `layers` are told what every step has computed. Raises ConfigError or StartError with the reason,
    RankLost when it is another rank's to tell."""
    try:
        runner = _runner(config, 0, layers)
        description = runner.describe()
        num_blocks = _cache_blocks(config, description)
        if others:
            from isthmus_worker.torch_engine.loader import model_digest

            own = cast("RankRunner", runner)
            runner = leader = LeaderRunner(own, RankLinks(others), config.parallel, model_digest, num_blocks)
            description, num_blocks = runner.describe(), leader.num_blocks
        page_table = runner.allocate_cache(*num_blocks)
        runner.warm_up()
    except RankLost:
        raise
    except IsthmusError as error:
        raise StartError(error.message) from error
    logger.info(
        "model loaded",
        extra={
            "model": description.name,
            "blocks": num_blocks,
            "block_bytes": description.block_bytes,
            "attention": description.kernels,
            "ranks": 1 + len(others),
        },
    )
    return LoadedModel(runner, description, num_blocks, page_table, _held(config, runner))


def _held(config: IsthmusConfig, runner: ModelRunner) -> tuple[tuple[Held, ...], ...]:
    parallel = config.parallel
    places = [topology_of(parallel, rank) for rank in range(parallel.world_size)]
    return tuple(
        tuple(
            Held(place.flat_rank, group, number)
            for place in places
            if place.tp_rank // place.tp_per_dp == dp_rank
            for group, number in enumerate(runner.block_lists(place.flat_rank))
        )
        for dp_rank in range(parallel.data_parallel_size)
    )


def load_rank(
    config: IsthmusConfig,
    rank: int,
    frames: FrameSocket,
    on_cache: Callable[[PageTable], None],
    layers: LayerProgress | None = None,
) -> Follower:
    """Loads the part of a rank other than the first and tells the first rank. Raises ConfigError or StartError."""
    try:
        runner = cast("RankRunner", _runner(config, rank, layers))
        follower = Follower(runner, frames, config.parallel.step_timeout_s, on_cache)
        follower.announce(rank, _cache_blocks(config, runner.describe()))
    except IsthmusError as error:
        raise StartError(error.message) from error
    return follower


def rank_device(config: IsthmusConfig, rank: int) -> str:
    """Where a rank computes: parallel.devices, else a CUDA device of its own, else the CPU. Raises ConfigError."""
    device, devices = config.engine.device, config.parallel.devices
    if devices is not None:
        return devices[rank]
    if config.parallel.world_size == 1 or device == "cpu":
        return device
    if device != "cuda":
        raise ConfigError(
            f"engine.device = {device}: an instance of {config.parallel.world_size} ranks takes cuda (rank r has "
            "cuda:r), or name the device of each rank in parallel.devices"
        )
    return f"cuda:{rank}"


def cache_options(config: IsthmusConfig) -> CacheOptions:
    """The section `cache`, as the layout of the memory takes it."""
    cache = config.cache
    return CacheOptions(
        nhd=cache.layout == "nhd", layer_major=cache.order == "layer_major", separate=cache.manager == "radix"
    )


def list_windows(config: IsthmusConfig, model: ModelDescription) -> tuple[int | None, ...]:
    """What is seen of each block list. A list that all layers share keeps everything."""
    return model.windows if config.cache.manager == "radix" else (None,)


def _cache_blocks(config: IsthmusConfig, model: ModelDescription) -> tuple[int, ...]:
    return cache_blocks(config.engine, model.block_bytes, list_windows(config, model))


def _runner(config: IsthmusConfig, rank: int, layers: LayerProgress | None) -> ModelRunner:
    engine = config.engine
    if engine.kind == "mock":
        from isthmus_worker.mock_engine import MockRunner, vocabulary

        if config.parallel.world_size > 1:
            raise ConfigError(
                f"parallel: {config.parallel.world_size} ranks need engine.kind = torch, the mock has one"
            )
        return MockRunner(
            engine.mock,
            config.model.served_name,
            engine.tokens_per_block,
            engine.max_model_len,
            cache=cache_options(config),
            vocab_size=vocabulary(config.model),
        )
    if config.model.path is None:
        raise ConfigError("model.path is not set: engine.kind = torch needs the folder of a model")
    try:
        import torch

        from isthmus_worker.torch_engine import TorchRunner
    except ImportError as error:
        raise StartError(f"engine.kind = torch: {error}; pip install 'isthmus-worker[torch]'") from error
    if (threads := engine_threads(config)) is not None:
        torch.set_num_threads(threads)
    runner = TorchRunner(
        config.model.path,
        config.model.dtype,
        rank_device(config, rank),
        engine.tokens_per_block,
        engine.max_model_len,
        engine.attention,
        config.parallel,
        rank,
        cache_options(config),
    )
    if layers is not None:
        runner.tell_layers(layers)
    return runner
