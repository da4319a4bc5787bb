"""The model runner of the mock engine: no torch, the shape of a model, tokens that prove the cache."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from isthmus_core.errors import ConfigError
from isthmus_worker.cache.layout import CacheOptions, CacheShape, LayerGroups
from isthmus_worker.engine import Sampling
from isthmus_worker.mock_engine import hashing
from isthmus_worker.mock_engine.draws import draw_tokens
from isthmus_worker.mock_engine.kv_memory import KvMemory
from isthmus_worker.mock_engine.vocabulary import BYTES
from isthmus_worker.runner import BatchRow, Draw, Drawn, ModelDescription, draw_points
from kvtransfer.page_table import HeadInterval

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus_core.config import MockConfig
    from isthmus_worker.mock_engine.kv_memory import Part
    from kvtransfer.page_table import PageTable

# Temporaries of one numpy expression stay below this many words (16 MiB).
_SLICE_WORDS = 1 << 21


class MockRunner:
    """Implements `isthmus_worker.runner.ModelRunner`; `hashing` says what it computes, `draws` how it chooses.

    Every step writes the KV of its tokens into the blocks and computes each wanted token from all bytes of [0, length)
    as they are in memory then: a page that is wrong, stale or missing changes the text. `max_model_len`: default
    `config.max_model_len`; more is refused with ConfigError. Token ids lie in [0, `vocab_size`).
    """

    def __init__(
        self,
        config: MockConfig,
        name: str,
        tokens_per_block: int,
        max_model_len: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
        cache: CacheOptions = CacheOptions(),  # noqa: B008 (frozen)
        vocab_size: int = BYTES,
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
        # Both [layer, K or V, word].
        self._salts = hashing.salts(inner).reshape(config.layers, 2, -1)
        self._coefficients = hashing.coefficients(inner).reshape(config.layers, 2, -1)
        windows = [config.sliding_window if layer % 2 else None for layer in range(config.layers)]
        layers = tuple(range(config.layers))
        groups = LayerGroups.of(windows)
        self._shape = CacheShape(layers, groups, HeadInterval(0, 1), tokens_per_block, config.bytes_per_token, cache)
        blocks = -(-longest // tokens_per_block)
        self._weights = hashing.weights(blocks * tokens_per_block).reshape(blocks, tokens_per_block)
        identity = f"isthmus mock {config.seed} {config.layers} {config.bytes_per_token}"
        identity += "" if vocab_size == BYTES else f" {vocab_size}"
        attention = "isthmus mock attention" + ("" if config.sliding_window is None else f" {config.sliding_window}")
        self._description = ModelDescription(
            name=name,
            max_model_len=longest,
            vocab_size=vocab_size,
            block_bytes=self._shape.block_bytes(),
            windows=groups.windows,
            weights_digest=xxhash.xxh3_128_digest(identity.encode()),
            attention_digest=xxhash.xxh3_128_digest(attention.encode()),
            kv_dtype="U64",
        )
        self._memory: KvMemory | None = None
        self._num_blocks: tuple[int, ...] = ()

    def describe(self) -> ModelDescription:
        """Sizes and identity of the model."""
        return self._description

    def allocate_cache(self, *num_blocks: int) -> PageTable:
        """Makes the KV memory, once: so many blocks for each block list. Raises StartError when it does not fit."""
        if self._memory is not None:
            raise RuntimeError("allocate_cache was called before: the cache must not move")
        self._memory = KvMemory(self._shape, num_blocks)
        self._num_blocks = num_blocks
        return self._memory.page_table()

    def block_lists(self, rank: int = 0) -> tuple[int, ...]:
        """See ModelRunner."""
        return self._shape.group_lists

    def warm_up(self) -> None:
        """First use of every function; only the block it used is zeroed, the rest is untouched memory."""
        draw = Draw(Sampling(1), 0, np.zeros(1, np.int64), np.zeros(0, np.int64))
        row = BatchRow(np.zeros(1, np.int64), 0, (np.zeros(1, np.int32),) * self._shape.lists, (draw,))
        self._compute([row])
        self._cache().zero(0)

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

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int = 0, dp_rank: int = 0) -> None:
        """Blocks `src` to blocks `dst` of block list `number`, whole. The mock is one rank: `dp_rank` is 0."""
        self._cache().copy(src, dst, number)

    def _compute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        if not rows:
            return []
        for index, row in enumerate(rows):
            self._check(row, f"row {index}")
        self._write(rows)
        drawn: list[tuple[Drawn, ...]] = [()] * len(rows)
        points = [(index, point) for index, row in enumerate(rows) if row.draws for point in draw_points(row)]
        if points:
            chosen = [point for _, point in points]
            lengths = np.array([row.start + len(row.token_ids) for row in chosen], np.int64)
            best = hashing.next_tokens(self._read(chosen, lengths), lengths)
            for (index, _), answer in zip(points, draw_tokens(best.tolist(), chosen), strict=True):
                drawn[index] += answer
        return drawn

    def _check(self, row: BatchRow, field: str) -> None:
        end, size = row.start + len(row.token_ids), self._tokens_per_block
        count = -(-end // size)
        if not len(row.token_ids) or row.start < 0 or end > self._max_model_len:
            raise ValueError(f"{field}: positions [{row.start}, {end}) do not lie in [0, {self._max_model_len})")
        if len(row.blocks) != self._shape.lists:
            raise ValueError(f"{field}: {len(row.blocks)} block lists, the cache has {self._shape.lists}")
        for number, (blocks, limit) in enumerate(zip(row.blocks, self._num_blocks, strict=True)):
            if count > len(blocks):
                raise ValueError(f"{field}: {end} tokens need {count} blocks, it has {len(blocks)}")
            window = self._shape.groups.windows[number] if self._shape.options.separate else None
            used = blocks[_low(row.start + 1, window) // size : count]
            if int(used.min()) < 0 or int(used.max()) >= limit:
                raise ValueError(f"{field}: names a block outside [0, {limit})")
        if int(row.token_ids.min()) < 0 or int(row.token_ids.max()) >= self._description.vocab_size:
            raise ValueError(f"{field}: names a token outside [0, {self._description.vocab_size})")

    def _write(self, rows: list[BatchRow]) -> None:
        """Stores the words of every token of the step."""
        size = self._tokens_per_block
        tokens = np.concatenate([row.token_ids for row in rows])
        positions = np.concatenate([np.arange(row.start, row.start + len(row.token_ids)) for row in rows])
        ends = np.cumsum([len(row.token_ids) for row in rows])[:-1]
        ordinals = np.split(positions // size, ends)
        bases = hashing.bases(self._config.seed, tokens, positions)
        for part in self._cache().parts:
            lists = [row.blocks[part.number][own] for row, own in zip(rows, ordinals, strict=True)]
            blocks, salts = np.concatenate(lists), self._salts[part.layers]
            step = max(1, _SLICE_WORDS // salts.size)
            for begin in range(0, len(bases), step):
                some = slice(begin, begin + step)
                values = hashing.mix(bases[some, None, None, None] ^ salts)
                at = blocks[some, None], part.within[None], slice(None), (positions[some] % size)[:, None]
                part.words[at] = values

    def _read(self, rows: list[BatchRow], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """state(length) of each row, from the bytes in memory: uint64[rows]."""
        states = np.zeros(len(rows), np.uint64)
        for part in self._cache().parts:
            states += self._read_part(part, rows, lengths)
        return states

    def _read_part(self, part: Part, rows: list[BatchRow], lengths: NDArray[np.int64]) -> NDArray[np.uint64]:
        """What the layers of one group add."""
        size, coefficients = self._tokens_per_block, self._coefficients[part.layers]
        lows = np.array([_low(length, part.window) for length in lengths.tolist()], np.int64)
        first, counts = lows // size, -(-lengths // size) - lows // size
        bounds = zip(rows, first.tolist(), (first + counts).tolist(), strict=True)
        blocks = np.concatenate([row.blocks[part.number][begin:end] for row, begin, end in bounds])
        starts = np.cumsum(counts) - counts
        ordinals = np.arange(len(blocks)) - np.repeat(starts - first, counts)
        begins, ends = (np.repeat(bound, counts) - ordinals * size for bound in (lows, lengths))
        sums = np.empty(len(blocks), np.uint64)
        step = max(1, _SLICE_WORDS // (coefficients.size * size))
        for begin in range(0, len(blocks), step):
            some = slice(begin, begin + step)
            words = part.words[blocks[some, None], part.within]
            per_token = np.einsum("bkhtw,khw->bt", words, coefficients)
            tokens = np.arange(size)
            seen = (tokens >= begins[some, None]) & (tokens < ends[some, None])
            sums[some] = np.einsum("bt,bt->b", per_token, np.where(seen, self._weights[ordinals[some]], np.uint64(0)))
        return np.add.reduceat(sums, starts)

    def _cache(self) -> KvMemory:
        if self._memory is None:
            raise RuntimeError("call allocate_cache first")
        return self._memory


def _low(length: int, window: int | None) -> int:
    """The first position that the last of `length` tokens sees."""
    return 0 if window is None else max(0, length - window)
