"""The mock says what the oracle says, and any wrong byte of the cache changes it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greedy_driver import GREEDY
from isthmus_core.config import MockConfig
from isthmus_core.errors import ConfigError
from isthmus_worker.mock_engine import MockRunner
from isthmus_worker.runner import BatchRow, Draw
from mock_oracle import oracle
from sched_bench import memory_of

PROMPT = [32 + index * 7 % 95 for index in range(37)]


def runner(blocks: int = 16, tokens_per_block: int = 4, **options) -> tuple[MockRunner, np.ndarray]:
    made = MockRunner(MockConfig(**{"max_model_len": 512, **options}), "mock", tokens_per_block)
    return made, memory_of(made.allocate_cache(blocks))


def row(tokens, start: int, blocks, want: bool = True, draws: tuple[Draw, ...] = GREEDY) -> BatchRow:
    return BatchRow(np.array(tokens, np.int64), start, (np.array(blocks, np.int32),), draws if want else ())


def tokens_of(made: MockRunner, rows: list[BatchRow]) -> list[int]:
    """The one token of each row."""
    return [drawn[0].token for drawn in made.execute(rows)]


def generate(made: MockRunner, prompt: list[int], n: int, blocks, chunks: list[int]) -> list[int]:
    position = 0
    for chunk in chunks:
        assert made.execute([row(prompt[position : position + chunk], position, blocks, False)]) == [()]
        position += chunk
    output = tokens_of(made, [row(prompt[position:], position, blocks)])
    while len(output) < n:
        output += tokens_of(made, [row([output[-1]], len(prompt) + len(output) - 1, blocks)])
    return output


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 256), min_size=1, max_size=60),
    tokens_per_block=st.integers(1, 9),
    options=st.fixed_dictionaries(
        {"seed": st.integers(0, 5), "layers": st.integers(1, 4), "bytes_per_token": st.sampled_from([8, 24, 64])}
    ),
    data=st.data(),
)
def test_any_chunking_and_block_order_gives_the_oracles_tokens(prompt, tokens_per_block, options, data):
    needed = -(-(len(prompt) + 6) // tokens_per_block)
    blocks = data.draw(st.permutations(range(needed + 3)))[:needed]
    made, _ = runner(needed + 3, tokens_per_block, **options)
    chunks, left = [], len(prompt) - 1
    while left and data.draw(st.booleans()):
        chunks.append(data.draw(st.integers(1, left)))
        left -= chunks[-1]
    assert generate(made, prompt, 6, blocks, chunks) == oracle(prompt, 6, **options)


def test_rows_of_one_batch_do_not_touch_each_other():
    made, _ = runner(64)
    prompts = [PROMPT[:length] for length in (1, 3, 4, 5, 16, 34)]
    places = [[10 * index + block for block in range(10)] for index in range(len(prompts))]
    batch = [row(prompt, 0, place) for prompt, place in zip(prompts, places, strict=True)]
    outputs = [[token] for token in tokens_of(made, batch)]
    for step in range(5):
        batch = [
            row([output[-1]], len(prompt) + step, place)
            for prompt, output, place in zip(prompts, outputs, places, strict=True)
        ]
        for output, token in zip(outputs, tokens_of(made, batch), strict=True):
            output.append(token)
    assert outputs == [oracle(prompt, 6) for prompt in prompts]


def test_tokens_are_printable_and_all_of_them_occur():
    made, _ = runner(128, 16)
    output = generate(made, [65], 400, range(128), [])
    assert set(output) <= set(range(32, 127))
    assert len(set(output)) > 80


def test_another_seed_is_another_model():
    assert oracle(PROMPT, 8, seed=1) != oracle(PROMPT, 8)
    first, second = runner()[0].describe(), runner(seed=1)[0].describe()
    assert first.weights_digest != second.weights_digest


@pytest.mark.parametrize("byte", [0, 1, 31, 63, 64, 127])
def test_every_byte_of_every_page_counts(byte: int):
    """One flipped bit anywhere in the pages of the prompt changes what follows."""
    for block in range(9):
        made, memory = runner()
        made.execute([row(PROMPT[:36], 0, range(9), False)])
        memory[block, byte] ^= 1
        output = tokens_of(made, [row(PROMPT[36:], 36, range(10))])
        for step in range(4):
            output += tokens_of(made, [row([output[-1]], 37 + step, range(11))])
        assert output != oracle(PROMPT, 5), (block, byte)


@pytest.mark.parametrize("harm", ["swapped", "missing", "stale"])
def test_pages_that_are_swapped_missing_or_stale_change_the_text(harm: str):
    made, memory = runner()
    if harm == "stale":
        made.execute([row([67] * 36, 0, range(9), False)])
        stale = memory[3].copy()
    made.execute([row(PROMPT[:36], 0, range(9), False)])
    if harm == "swapped":
        memory[[2, 3]] = memory[[3, 2]]
    elif harm == "missing":
        memory[3] = 0
    else:
        memory[3] = stale
    output = tokens_of(made, [row(PROMPT[36:], 36, range(10))])
    output += tokens_of(made, [row([output[-1]], 37, range(10))])
    output += tokens_of(made, [row([output[-1]], 38, range(10))])
    assert output != oracle(PROMPT, 3)


def test_bytes_behind_the_last_token_do_not_count():
    made, memory = runner()
    memory[9] = 255
    assert generate(made, PROMPT, 4, range(11), []) == oracle(PROMPT, 4)


def test_warm_up_leaves_the_cache_zeroed():
    made, memory = runner()
    made.warm_up()
    assert not memory.any()


def test_big_tokens_are_computed_in_slices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("isthmus_worker.mock_engine.runner._SLICE_WORDS", 64)
    made, _ = runner(32)
    assert generate(made, PROMPT, 8, range(31, 15, -1), [5, 9]) == oracle(PROMPT, 8)


def test_the_page_table_describes_the_memory():
    made = MockRunner(MockConfig(layers=3, bytes_per_token=24), "mock", 8)
    table = made.allocate_cache(5)
    (pool,), (region,) = table.pools, table.regions
    assert pool.slot_bytes == made.describe().bytes_per_block == 3 * 2 * 8 * 24
    assert region.size_bytes == 5 * pool.slot_bytes
    assert region.base_address % 4096 == 0
    made.execute([row([65], 0, [2])])
    memory = memory_of(table)
    for view in table.groups[0].views:
        for layer, offset, size in zip(*(getattr(view.entries, n) for n in ("layer", "offset", "size")), strict=True):
            assert size == 8 * 24
            buffer = memory[2, int(offset) : int(offset) + int(size)]
            assert buffer[:24].any(), (view.roles, layer)
            assert not buffer[24:].any()


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (row([], 0, [0]), "positions"),
        (row([65] * 5, 0, [0]), "need 2 blocks"),
        (row([65], 0, [16]), "names a block"),
        (row([65], 0, [-1]), "names a block"),
        (row([257], 0, [0]), "names a token"),
        (row([65], 512, range(16)), "positions"),
    ],
)
def test_rows_that_do_not_fit_are_refused(bad: BatchRow, words: str):
    made, memory = runner()
    with pytest.raises(ValueError, match=words):
        made.execute([row([65], 0, [1]), bad])
    assert not memory.any()


def test_time_is_spent_as_configured():
    slept: list[float] = []
    config = MockConfig(prefill_us_per_token=10, decode_us=700)
    made = MockRunner(config, "mock", 4, sleep=slept.append)
    made.allocate_cache(16)
    made.execute([row([65] * 9, 0, range(3), False)])
    made.execute([row([65], 9, range(3)), row([65] * 5, 0, range(3, 6))])
    assert slept == pytest.approx([90e-6, 750e-6])


def test_more_positions_than_the_model_has_are_refused():
    with pytest.raises(ConfigError, match=r"engine\.max_model_len = 9000"):
        MockRunner(MockConfig(), "mock", 16, 9000)
