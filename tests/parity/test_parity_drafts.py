"""Draft tokens of the context instance, tried by the generation instance: the tokens are those without drafts.

A small random model repeats itself after a while. So there are beginnings of what it says of which the end has been
there before and went on in the same way (right drafts), in another way (wrong ones), or first the one, then the other.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from isthmus_worker.scheduler.drafts import look_up
from parity_fleet import Fleet, Run, Shape, run_at_once, run_split
from parity_models import VOCAB
from parity_oracle import Case, expected

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="session")]
DRAFTS, NEW, SAID = 4, 16, 300


class Beginning(NamedTuple):
    """A prompt, what follows it, and how many drafts there are, the first `right` ones of which are right."""

    prompt: tuple[int, ...]
    follows: list[int]
    drafts: int
    right: int


@pytest.fixture(scope="module", name="texts")
def _texts(llama: Path) -> list[list[int]]:
    """What the model says for long."""
    rng = np.random.default_rng(3)
    starts = [Case(tuple(rng.integers(4, VOCAB, 6).tolist()), False, SAID) for _ in range(3)]
    return [[*start.prompt, *said] for start, said in zip(starts, expected(llama, starts), strict=True)]


def guess(tokens: list[int]) -> tuple[int, ...]:
    """Of a context instance that has just drawn the last of these tokens."""
    return look_up(np.array(tokens, np.int64), DRAFTS)


@pytest.fixture(scope="module", name="beginnings")
def _beginnings(texts: list[list[int]]) -> list[Beginning]:
    """One of each kind."""
    found: dict[str, Beginning] = {}
    for text in texts:
        for end in range(20, len(text) - NEW):
            drafts = guess(text[: end + 1])
            agree = [mine == theirs for mine, theirs in zip(drafts, text[end + 1 :], strict=False)]
            right = (*agree, False).index(False)
            kinds = {"right": right == len(drafts) > 1, "some": 0 < right < len(drafts), "wrong": drafts and not right}
            for kind in (name for name, fits in kinds.items() if fits):
                found.setdefault(kind, Beginning(tuple(text[:end]), text[end : end + NEW], len(drafts), right))
    assert set(found) == {"right", "some", "wrong"}, found
    return [found[kind] for kind in ("right", "some", "wrong")]


@pytest.mark.parametrize("run", [run_split, run_at_once], ids=["context first", "at once"])
async def test_right_and_wrong_drafts(fleet: Fleet, llama: Path, beginnings: list[Beginning], run: Run) -> None:
    pair = await fleet.pair(Shape(llama, tp=2, settings=(f"engine.draft_tokens={DRAFTS}",)), Shape(llama))
    wanted = [Case(one.prompt, False, NEW) for one in beginnings]
    found = await asyncio.gather(*(run(*pair, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == [one.follows for one in beginnings]
    counted = [(report.draft_tokens, report.accepted_draft_tokens) for _, report in found]
    assert counted == [(one.drafts, one.right) for one in beginnings]
    for one in pair:
        await one.process.idle()


async def test_drafts_of_seeded_answers(fleet: Fleet, llama: Path, texts: list[list[int]]) -> None:
    """What is drawn does not depend on what was guessed."""
    prompts = [tuple(texts[0][:end]) for end in range(30, SAID, 6)]
    firsts = expected(llama, [Case(prompt, True, 1) for prompt in prompts])
    guessed = [prompt for prompt, first in zip(prompts, firsts, strict=True) if guess([*prompt, *first])]
    wanted = [Case(prompt, True, NEW) for prompt in guessed[:4]]
    assert wanted
    pair = await fleet.pair(Shape(llama, tp=2, settings=(f"engine.draft_tokens={DRAFTS}",)), Shape(llama))
    found = await asyncio.gather(*(run_split(*pair, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == expected(llama, wanted)
    assert all(report.draft_tokens for _, report in found)
    for one in pair:
        await one.process.idle()
