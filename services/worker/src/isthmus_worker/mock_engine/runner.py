"""The model runner of the mock engine: no torch, the shape of a model, tokens that prove the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from isthmus_core.errors import ConfigError
from isthmus_worker.engine import Sampling
from isthmus_worker.mock_engine import hashing
from isthmus_worker.mock_engine.draws import draw_tokens
from isthmus_worker.mock_engine.kv_memory import KvMemory
from isthmus_worker.runner import BatchRow, Draw, Drawn, ModelDescription

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_core.config import MockConfig
    from kvtransfer.page_table import PageTable

# 256 byte values and the end of an answer, which the mock itself never says.
VOCAB_SIZE = 257
# Temporaries of one numpy expression stay below this many words (16 MiB).
_SLICE_WORDS = 1 << 21


class MockRunner:
    """Implements `isthmus_worker.runner.ModelRunner`; `hashing` says what it computes, `draws` how it chooses.

    Every step writes the KV of its tokens into the blocks and computes each wanted token from all bytes of [0, length)
    as they are in memory then: a page that is wrong, stale or missing changes the text. `max_model_len`: default
    `config.max_model_len`; more is refused with ConfigError.
    """

    def __init__(
        self,
        config: MockConfig,
        name: str,
        tokens_per_block: int,
        max_model_len: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        longest = config.max_model_len if max_model_len is None else max_model_len
        if longest > config.max_model_len:
            raise ConfigError(
                f"engine.max_model_len = {longest}: the mock model ends at engine.mock.max_model_len = "
                f"{config.max_model_len} tokens"
            )
        self._config, self._sleep = config, sleep
        self._tokens_per_block, self._max_model_len = tokens_per_block, longest
        inner = config.layers * 2 * (config.bytes_per_token // 8)
        # Both [layer and K or V, word].
        self._salts = hashing.salts(inner).reshape(config.layers * 2, -1)
        self._coefficients = hashing.coefficients(inner).reshape(config.layers * 2, -1)
        blocks = -(-longest // tokens_per_block)
        self._weights = hashing.weights(blocks * tokens_per_block).reshape(blocks, tokens_per_block)
        identity = f"isthmus mock {config.seed} {config.layers} {config.bytes_per_token}"
        self._description = ModelDescription(
            name=name,
            max_model_len=longest,
            vocab_size=VOCAB_SIZE,
            bytes_per_block=inner * 8 * tokens_per_block,
            weights_digest=xxhash.xxh3_128_digest(identity.encode()),
            attention_digest=xxhash.xxh3_128_digest(b"isthmus mock attention"),
            kv_dtype="U64",
        )
        self._memory: KvMemory | None = None

    def describe(self) -> ModelDescription:
        """Sizes and identity of the model."""
        return self._description

    def allocate_cache(self, num_blocks: int) -> PageTable:
        """Makes the KV memory, once. Raises StartError when it does not fit."""
        if self._memory is not None:
            raise RuntimeError("allocate_cache was called before: the cache must not move")
        config = self._config
        self._memory = KvMemory(num_blocks, config.layers, self._tokens_per_block, config.bytes_per_token)
        return self._memory.page_table()

    def warm_up(self) -> None:
        """First use of every function; only the block it used is zeroed, the rest is untouched memory."""
        draw = Draw(Sampling(1), 0, np.zeros(1, np.int64), np.zeros(0, np.int64))
        row = BatchRow(np.zeros(1, np.int64), 0, np.zeros(1, np.int32), (draw,))
        self._compute([row])
        self._words()[0] = 0

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        """One step. Raises ValueError for rows that do not fit the cache or the model."""
        drawn = self._compute(rows)
        config = self._config
        prefilled = sum(len(row.token_ids) for row in rows if len(row.token_ids) > 1 or row.start == 0)
        decodes = any(len(row.token_ids) == 1 and row.start > 0 for row in rows)
        pause = prefilled * config.prefill_us_per_token + decodes * config.decode_us
        if pause:
            self._sleep(pause * 1e-6)
        return drawn

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32]) -> None:
        """Blocks `src` to blocks `dst`, whole."""
        words = self._words()
        words[dst] = words[src]

    def _compute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        if not rows:
            return []
        for index, row in enumerate(rows):
            self._check(row, f"row {index}")
        self._write(rows)
        drawn: list[tuple[Drawn, ...]] = [()] * len(rows)
        wanted = [index for index, row in enumerate(rows) if row.draws]
        if wanted:
            chosen = [rows[index] for index in wanted]
            lengths = np.array([row.start + len(row.token_ids) for row in chosen], np.int64)
            best = hashing.next_tokens(self._read(chosen, lengths), lengths)
            for index, row in zip(wanted, draw_tokens(best.tolist(), chosen), strict=True):
                drawn[index] = row
        return drawn

    def _check(self, row: BatchRow, field: str) -> None:
        end = row.start + len(row.token_ids)
        blocks = -(-end // self._tokens_per_block)
        if not len(row.token_ids) or row.start < 0 or end > self._max_model_len:
            raise ValueError(f"{field}: positions [{row.start}, {end}) do not lie in [0, {self._max_model_len})")
        if blocks > len(row.blocks):
            raise ValueError(f"{field}: {end} tokens need {blocks} blocks, it has {len(row.blocks)}")
        used = row.blocks[:blocks]
        if int(used.min()) < 0 or int(used.max()) >= len(self._words()):
            raise ValueError(f"{field}: names a block outside [0, {len(self._words())})")
        if int(row.token_ids.min()) < 0 or int(row.token_ids.max()) >= VOCAB_SIZE:
            raise ValueError(f"{field}: names a token outside [0, {VOCAB_SIZE})")

    def _write(self, rows: list[BatchRow]) -> None:
        """Stores the words of every token of the step."""
        size = self._tokens_per_block
        tokens = np.concatenate([row.token_ids for row in rows])
        positions = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])
        ends = np.cumsum([len(row.token_ids) for row in rows])[:-1]
        ordinals = np.split(positions // size, ends)
        blocks = np.concatenate([row.blocks[part] for row, part in zip(rows, ordinals, strict=True)])
        bases = hashing.bases(self._config.seed, tokens, positions)
        words, step = self._words(), max(1, _SLICE_WORDS // self._salts.size)
        for begin in range(0, len(bases), step):
            part = slice(begin, begin + step)
            values = hashing.mix(bases[part, None, None] ^ self._salts)
            words[blocks[part], :, positions[part] % size] = values

    def _read(self, rows: list[BatchRow], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """state(length) of each row, from the bytes in memory: uint64[rows]."""
        size = self._tokens_per_block
        counts = -(-lengths // size)
        blocks = np.concatenate([row.blocks[:count] for row, count in zip(rows, counts.tolist(), strict=True)])
        starts = np.cumsum(counts) - counts
        ordinals = np.arange(len(blocks)) - np.repeat(starts, counts)
        valid = np.repeat(lengths, counts) - ordinals * size
        sums = np.empty(len(blocks), np.uint64)
        words, step = self._words(), max(1, _SLICE_WORDS // (self._salts.size * size))
        for begin in range(0, len(blocks), step):
            part = slice(begin, begin + step)
            per_token = np.einsum("bitw,iw->bt", words[blocks[part]], self._coefficients)
            weights = np.where(np.arange(size) < valid[part, None], self._weights[ordinals[part]], np.uint64(0))
            sums[part] = np.einsum("bt,bt->b", per_token, weights)
        return np.add.reduceat(sums, starts)

    def _words(self) -> NDArray[np.uint64]:
        if self._memory is None:
            raise RuntimeError("call allocate_cache first")
        return self._memory.words
