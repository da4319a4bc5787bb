"""The model runner of the reference engine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_core.config_parallel import ParallelConfig
from isthmus_worker.cache.layout import CacheOptions, CacheShape, LayerGroups
from isthmus_worker.engine import Sampling
from isthmus_worker.parallel.shard import shard_of
from isthmus_worker.runner import BatchRow, Draw, Drawn, ModelDescription, NonFiniteLogits, draw_points
from isthmus_worker.sampling.sampler import draw_tokens
from isthmus_worker.torch_engine.attention import AttentionBackend, choose_attention, open_attention
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.collectives import Collectives, Ranks, Store, open_store
from isthmus_worker.torch_engine.joint_step import JointStep, join
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights, model_digest
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import ModelUnusable, read_config
from kvtransfer.page_table import HeadInterval

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvtransfer.page_table import PageTable
    from kvtransfer.transceiver.layer_progress import LayerProgress

logger = logging.getLogger(__name__)

# As the configuration spells them -> as safetensors spells them.
_DTYPES = {
    "float32": (torch.float32, "F32"),
    "bfloat16": (torch.bfloat16, "BF16"),
    "float16": (torch.float16, "F16"),
}


class TorchRunner:
    """A decoder from a folder of safetensors. Implements `isthmus_worker.runner.ModelRunner`.

    `dtype`: "auto" (the checkpoint's), "float32", "bfloat16" or "float16". `device`: "cpu", "cuda" or "cuda:N".
    `max_model_len`: default the model's own; more than that is refused. `attention`: "auto", "sdpa" or "flashinfer".
    `rank` of an instance that is spread as `parallel` says: it has a part of the model, whose ranks must `meet` before
    the first step, and all of them are given the same rows; `digests`: of the tensors that it has hashed.
    Raises ModelUnusable or ConfigError.
    """

    def __init__(
        self,
        model_path: Path,
        dtype: str = "auto",
        device: str = "cpu",
        tokens_per_block: int = 16,
        max_model_len: int | None = None,
        attention: str = "auto",
        parallel: ParallelConfig | None = None,
        rank: int = 0,
        cache: CacheOptions = CacheOptions(),  # noqa: B008 (frozen)
    ) -> None:
        config = read_config(model_path)
        parallel = parallel or ParallelConfig()
        self._parallel, self.shard = parallel, shard_of(config, parallel, rank)
        self._max_model_len = _max_model_len(max_model_len, config.max_position)
        self._dtype, kv_dtype = _choose_dtype(dtype, config.dtype)
        self._device = _open_device(device)
        self.device = str(self._device)
        self._store: Store | None = None
        self._choice = choose_attention(attention, config, self._dtype, self._device)
        self._config = config
        groups = LayerGroups.of(config.windows)
        self._shape = CacheShape(
            tuple(self.shard.layers),
            groups,
            HeadInterval(*self.shard.heads.kv),
            tokens_per_block,
            config.head_dim * self._dtype.itemsize,
            cache,
        )
        with torch.inference_mode():
            self._model = Decoder(config, self._max_model_len, self._dtype, self._device, self.shard)
            self.digests = load_weights(model_path, self._model.targets(), config.tied, rank, parallel.world_size)
            packed = self._model.pack()
        logger.info("attention by %s: %s", self._choice.name, self._choice.reason, extra={"packed_weights": packed})
        self._description = ModelDescription(
            name=model_path.name,
            max_model_len=self._max_model_len,
            vocab_size=config.vocab_size,
            block_bytes=self._shape.block_bytes(),
            windows=groups.windows,
            weights_digest=model_digest(self.digests),
            attention_digest=config.attention_digest(),
            kv_dtype=kv_dtype,
            kernels=self._choice.name,
        )
        self._pool: KvPool | None = None
        self._attention: AttentionBackend | None = None
        self._layers: LayerProgress | None = None

    def describe(self) -> ModelDescription:
        """Sizes and identity of the model."""
        return self._description

    @torch.inference_mode()
    def allocate_cache(self, *num_blocks: int) -> PageTable:
        """Makes the KV memory, once: so many blocks for each block list."""
        if self._pool is not None:
            raise RuntimeError("allocate_cache was called before: the cache must not move")
        self._pool = KvPool(self._shape, num_blocks, self._config.head_dim, self._dtype, self._device)
        self._attention = open_attention(self._choice, self.shard.heads.heads, self._pool)
        return self._pool.page_table()

    def block_lists(self, rank: int = 0) -> tuple[int, ...]:
        """The block list of each layer group in the page table of a rank of this instance."""
        return replace(self._shape, layers=tuple(shard_of(self._config, self._parallel, rank).layers)).group_lists

    def warm_up(self) -> None:
        """First use of every kernel, before the first request pays for it."""
        for rows in self.warm_up_rows():
            self.execute(rows)
        self.zero_cache()

    def warm_up_rows(self) -> list[list[BatchRow]]:
        """The steps of a warm-up."""
        length = min(self._shape.tokens_per_block, self._max_model_len)
        blocks, tokens = (np.zeros(1, np.int32),) * self._shape.lists, np.zeros(length, np.int64)
        half = max(length // 2, 1)
        greedy = Draw(Sampling(1), 0, tokens, tokens[:0])
        sampled = Draw(Sampling(1, temperature=1.0, top_p=0.5, repetition_penalty=1.5, logprobs=1), 0, tokens, tokens)
        steps = (
            (tokens[:half], 0, (greedy, sampled)),
            (tokens[half:], half, (greedy,)),
            (tokens[:1], length - 1, (greedy,)),
        )
        groups = range(self.shard.topology.dp_size)
        return [
            [BatchRow(ids, start, blocks, draws, dp_rank) for dp_rank in groups]
            for ids, start, draws in steps
            if len(ids)
        ]

    def open_meeting(self, ranks: int) -> int:
        """On rank 0: a port of the loopback interface where the ranks of this instance meet."""
        self._store = open_store(0, ranks)
        return self._store.port

    def meet(self, port: int, backend: str, timeout_s: float) -> None:
        """Connects the ranks of the instance; all of them have to come. Raises RankLost."""
        topology = self.shard.topology
        store = self._store or open_store(port, topology.world_size)
        columns = -(-self._config.vocab_size // topology.tp_size)
        self.connect(Ranks(store, backend, topology, timeout_s, self._device, self._dtype, columns))

    def connect(self, collectives: Collectives) -> None:
        """The way to the other ranks."""
        self._model.collectives = collectives

    def tell_layers(self, layers: LayerProgress) -> None:
        """From the first step on `layers` is told which of them have their KV in memory."""
        self._layers, self._model.on_layer = layers, self._layer_done

    def _layer_done(self, index: int) -> None:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
        if self._layers is not None:
            self._layers.done(self.shard.layers[index] + 1, event)

    @torch.inference_mode()
    def zero_cache(self) -> None:
        """Back to the state before the warm-up."""
        self._cache()[0].zero()
        self._finish()

    @torch.inference_mode()
    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        """One step. Raises ValueError for rows that do not fit the cache, NonFiniteLogits for rows without a token.
        Only rank 0 draws tokens."""
        if not rows:
            return []
        if self._layers is not None:
            self._layers.begin()
        step, logits = self._compute(rows)
        drawn: list[tuple[Drawn, ...]] = [()] * len(rows)
        wanted: list[int] = [] if logits is None else step.wanted.tolist()
        if logits is not None:
            # In the order of `wanted`: once for each place in a row behind which tokens are drawn.
            points = [point for row in dict.fromkeys(wanted) for point in draw_points(rows[row])]
            for row, answer in zip(wanted, draw_tokens(logits, points), strict=True):
                drawn[row] += answer
        self._finish()
        if self._layers is not None:
            self._layers.end()
        bad = sorted(row for row in set(wanted) if len(drawn[row]) < len(rows[row].draws))
        for row in bad:
            drawn[row] = ()
        if bad:
            raise NonFiniteLogits(bad, drawn)
        return drawn

    def _compute(self, rows: list[BatchRow]) -> tuple[JointStep, Tensor | None]:
        """The part of this rank. Logits are on rank 0, for the rows that are `wanted`."""
        pool, attention = self._cache()
        dp_size, dp_rank = self.shard.topology.dp_size, self.shard.dp_rank
        own = rows if dp_size == 1 else [row for row in rows if row.dp_rank == dp_rank]
        plan = plan_step(own, pool.shapes, self._config.vocab_size, self._max_model_len) if own else None
        if plan is not None:
            pool.begin_step(plan)
        step = join(rows, dp_size, dp_rank, plan)
        return step, self._model.forward(step, None if plan is None else attention.begin(plan))

    @torch.inference_mode()
    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int = 0, dp_rank: int = 0) -> None:
        """Blocks `src` to blocks `dst` of block list `number` of attention-dp group `dp_rank`, whole."""
        if dp_rank == self.shard.dp_rank:
            self._cache()[0].copy(src, dst, number)
            self._finish()

    def _cache(self) -> tuple[KvPool, AttentionBackend]:
        if self._pool is None or self._attention is None:
            raise RuntimeError("call allocate_cache first")
        return self._pool, self._attention

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _max_model_len(asked: int | None, most: int) -> int:
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise ModelUnusable(f"engine.max_model_len = {asked}: the model has positions for {most} tokens")
    return asked


def _choose_dtype(asked: str, checkpoint: str) -> tuple[torch.dtype, str]:
    name = checkpoint if asked == "auto" else asked
    if name not in _DTYPES:
        raise ModelUnusable(f"model.dtype = {asked} ({name}): set model.dtype to one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _open_device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        device = torch.device("cuda", device.index or 0)
        if device.index >= count:
            raise ModelUnusable(f"engine.device = {name}: torch sees {count} CUDA devices")
        # cuDNN builds a plan (50 ms and more) for every new shape, and each decode step has one.
        torch.backends.cuda.enable_cudnn_sdp(False)
    return device
