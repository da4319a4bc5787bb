"""Hand-offs between instances whose caches differ in everything: managers, layouts, block sizes, and what is reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine_pair import EnginePair, first_of
from engine_process import Settings, engines, settings
from greedy_driver import open_oracle, oracle_greedy
from isthmus_worker.engine import Finished
from mock_oracle import oracle
from tiny_models import tiny_model

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed"),
]
WINDOW = 40
MOCK = {"layers": 4, "bytes_per_token": 16, "sliding_window": WINDOW}
PROMPT = [32 + index * 7 % 95 for index in range(300)]
Start = Callable[[Settings, Settings], EnginePair]


@pytest.fixture(name="start", scope="module")
def _start() -> Iterator[Start]:
    with engines() as make:
        yield lambda context, generation: EnginePair(make, context, generation)


def instance(
    tokens: int = 16, manager: str = "block_table", layout: str = "hnd", order: str = "slot_major"
) -> Settings:
    """The settings of one side. Prompts go in chunks."""
    engine: Mapping[str, Any] = {"num_blocks": 96, "tokens_per_block": tokens, "max_batch_tokens": 64, "mock": MOCK}
    return settings(engine=engine, cache={"manager": manager, "layout": layout, "order": order})


PAIRS = {
    "block_table_to_radix": (instance(), instance(manager="radix")),
    "radix_16_to_block_table_24": (instance(16, "radix"), instance(24)),
    "radix_32_to_radix_16_other_layout": (instance(32, "radix"), instance(16, "radix", "nhd", "layer_major")),
}
NIGHTLY = {
    "block_table_16_to_32": (instance(16), instance(32)),
    "block_table_32_to_16": (instance(32), instance(16)),
    "layer_major_to_slot_major": (instance(order="layer_major"), instance()),
    "slot_major_to_layer_major": (instance(), instance(order="layer_major")),
    "nhd_to_hnd": (instance(layout="nhd"), instance()),
    "radix_to_radix": (instance(manager="radix"), instance(manager="radix")),
}
CASES = [
    *(pytest.param(*pair, id=name) for name, pair in PAIRS.items()),
    *(pytest.param(*pair, id=name, marks=pytest.mark.nightly) for name, pair in NIGHTLY.items()),
]


@pytest.mark.parametrize(("context", "generation"), CASES)
def test_any_cache_feeds_any_other_and_both_reuse_what_they_have(start: Start, context: Settings, generation: Settings):
    """Tokens depend on every byte that arrives, and on none that nobody sees."""
    both = start(context, generation)
    size = generation["engine"]["tokens_per_block"]
    cached: list[tuple[int, int]] = []
    moved: list[int] = []
    # The second prompt begins as the first one; the third one is shorter than the window.
    for number, prompt in enumerate((PROMPT[:200], PROMPT, PROMPT[: WINDOW - 7])):
        leg, offer = both.prefill(prompt, 70, number)
        moved.append(both.hand_off(leg, offer).stats.bytes)
        text = [*first_of(leg), *both.generation.tokens(leg.key)]
        assert text == oracle(prompt, 70, layers=4, bytes_per_token=16, window=WINDOW)
        end = both.generation.finished(leg.key)
        assert isinstance(end, Finished)
        cached.append((both.context.finished(leg.key).report.cached_tokens, end.report.cached_tokens))
    # Two layers of each kind; what is left of a block may go with the rest of it.
    token, block = 2 * 2 * 16, 2 * 2 * 16 * 32
    fresh = token * (200 + WINDOW - 1)
    assert fresh <= moved[0] < fresh + block, "layers with a window get what the next token sees"
    if generation["cache"]["manager"] == "radix":
        assert cached[1][1] >= 200 // size * size, "what came over once, and what was decoded, does not come again"
        rest = token * (300 - cached[1][1] + WINDOW - 1)
        assert rest <= moved[1] < rest + block
    assert cached[1][0] > 0
    both.stop()


@pytest.mark.nightly
@pytest.mark.timeout(180)
@pytest.mark.parametrize("turned", [False, True], ids=["16_to_24", "24_to_16"])
def test_the_torch_engine_hands_off_between_unequal_caches(start: Start, tmp_path: Path, turned: bool):
    """A model with mixed windows: block table, 16 tokens, head-major; radix tree, 24 tokens, token-major, by layer."""
    folder = tiny_model(
        tmp_path / "model",
        "Qwen2",
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        use_sliding_window=True,
        sliding_window=WINDOW,
    )
    torch = {"kind": "torch", "num_blocks": 64, "max_batch_tokens": 64}
    table, tree = (
        settings(engine={**torch, "tokens_per_block": tokens}, model={"path": str(folder), "name": "tiny"}, cache=cache)
        for tokens, cache in ((16, {}), (24, {"manager": "radix", "layout": "nhd", "order": "layer_major"}))
    )
    both = start(tree, table) if turned else start(table, tree)
    oracle_model = open_oracle(folder)
    prompt = [4 + at * 7 % 250 for at in range(150)]
    for number, length in enumerate((20, 150, 97)):
        leg, offer = both.prefill(prompt[:length], 12, number)
        both.hand_off(leg, offer)
        text = [*first_of(leg), *both.generation.tokens(leg.key)]
        assert text == oracle_greedy(oracle_model, prompt[:length], 12), length
    both.stop()
