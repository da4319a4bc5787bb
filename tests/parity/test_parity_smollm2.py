"""Token parity with a trained model: SmolLM2-135M, 9 query and 3 KV heads, which two ranks share as 6 + 3."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from isthmus_worker.fetch_model import fetch_model
from parity_fleet import Fleet, Shape, run_split
from parity_oracle import Case, expected

pytestmark = [
    pytest.mark.model,
    pytest.mark.integration,
    pytest.mark.timeout(400),
    pytest.mark.asyncio(loop_scope="session"),
]
TEXTS = (
    "The isthmus joins two lands and parts two seas.",
    "Ships once sailed ten thousand miles to pass it; now a canal cuts through the hills, and pilots guide the hulls "
    "from lock to lock. In spring the rain fills the lake above them, and in summer",
    "Write a list of the five longest rivers of the world, longest first, and say where each of them begins and ends. "
    * 4,
)
ROWS = {
    "TP2 to TP1": ({"tp": 2}, {}),
    "TP1 to TP1": ({}, {}),
    "TP1 to TP2": ({}, {"tp": 2}),
    "TP3 to TP1": ({"tp": 3}, {}),
}


@pytest.fixture(scope="module", name="folder")
def _folder() -> Path:
    return fetch_model()


@pytest.mark.parametrize(
    "row", [row if row == "TP2 to TP1" else pytest.param(row, marks=pytest.mark.nightly) for row in ROWS]
)
async def test_smollm2(fleet: Fleet, folder: Path, row: str) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tuple(tokenizer.encode(text).ids) for text in TEXTS]
    wanted = [Case(prompt, seeded) for seeded in (False, True) for prompt in prompts]
    context, generation = (Shape(folder, **sizes) for sizes in ROWS[row])
    first, second = await fleet.pair(context, generation)
    found = await asyncio.gather(*(run_split(first, second, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == expected(folder, wanted)
    for one in (first, second):
        await one.process.idle()
