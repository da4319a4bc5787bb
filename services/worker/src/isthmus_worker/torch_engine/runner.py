"""The model runner of the reference engine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw, Drawn, ModelDescription, NonFiniteLogits
from isthmus_worker.sampling.sampler import draw_tokens
from isthmus_worker.torch_engine.attention import AttentionBackend, choose_attention, open_attention
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.kv_pool import KvPool, block_bytes
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import ModelUnusable, read_config

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.page_table import PageTable

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
    Raises ModelUnusable.
    """

    def __init__(
        self,
        model_path: Path,
        dtype: str = "auto",
        device: str = "cpu",
        tokens_per_block: int = 16,
        max_model_len: int | None = None,
        attention: str = "auto",
    ) -> None:
        config = read_config(model_path)
        self._max_model_len = _max_model_len(max_model_len, config.max_position)
        self._dtype, kv_dtype = _choose_dtype(dtype, config.dtype)
        self._device = _open_device(device)
        self._choice = choose_attention(attention, config, self._dtype, self._device)
        self._tokens_per_block = tokens_per_block
        self._config = config
        with torch.inference_mode():
            self._model = Decoder(config, self._max_model_len, self._dtype, self._device)
            digest = load_weights(model_path, self._model.targets(), config.tied)
            packed = self._model.pack()
        logger.info("attention by %s: %s", self._choice.name, self._choice.reason, extra={"packed_weights": packed})
        self._description = ModelDescription(
            name=model_path.name,
            max_model_len=self._max_model_len,
            vocab_size=config.vocab_size,
            bytes_per_block=block_bytes(config, tokens_per_block, self._dtype),
            weights_digest=digest,
            attention_digest=config.attention_digest(),
            kv_dtype=kv_dtype,
            kernels=self._choice.name,
        )
        self._pool: KvPool | None = None
        self._attention: AttentionBackend | None = None

    def describe(self) -> ModelDescription:
        """Sizes and identity of the model."""
        return self._description

    @torch.inference_mode()
    def allocate_cache(self, num_blocks: int) -> PageTable:
        """Makes the KV memory, once."""
        if self._pool is not None:
            raise RuntimeError("allocate_cache was called before: the cache must not move")
        self._pool = KvPool(self._config, num_blocks, self._tokens_per_block, self._dtype, self._device)
        self._attention = open_attention(self._choice, self._config, self._pool)
        return self._pool.page_table()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """First use of every kernel, before the first request pays for it."""
        length = min(self._tokens_per_block, self._max_model_len)
        block, tokens = np.zeros(1, np.int32), np.zeros(length, np.int64)
        half = max(length // 2, 1)
        greedy = Draw(Sampling(1), 0, tokens, tokens[:0])
        sampled = Draw(Sampling(1, temperature=1.0, top_p=0.5, repetition_penalty=1.5, logprobs=1), 0, tokens, tokens)
        for row in (
            BatchRow(tokens[:half], 0, block, (greedy, sampled)),
            BatchRow(tokens[half:], half, block, (greedy,)),
            BatchRow(tokens[:1], length - 1, block, (greedy,)),
        ):
            if len(row.token_ids):
                self.execute([row])
        self._cache()[0].zero()
        self._finish()

    @torch.inference_mode()
    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        """One step. Raises ValueError for rows that do not fit the cache, NonFiniteLogits for rows without a token."""
        if not rows:
            return []
        pool, attention = self._cache()
        plan = plan_step(rows, pool.shape, self._config.vocab_size, self._max_model_len)
        pool.begin_step(plan)
        logits = self._model.forward(plan, attention.begin(plan))
        drawn: list[tuple[Drawn, ...]] = [()] * len(rows)
        wanted: list[int] = plan.wanted.tolist()
        if wanted:
            for row, answer in zip(wanted, draw_tokens(logits, [rows[row] for row in wanted]), strict=True):
                drawn[row] = answer
        self._finish()
        bad = sorted(row for row in wanted if not drawn[row])
        if bad:
            raise NonFiniteLogits(bad, drawn)
        return drawn

    @torch.inference_mode()
    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Blocks `src` to blocks `dst`, whole."""
        self._cache()[0].copy(src, dst)

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
