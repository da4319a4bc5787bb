"""bf16, both sides cut alike: the bytes of the cache are the same in the memory of both processes, and so is every log
probability of the unsplit run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_pair import EnginePair
from engine_process import EngineUnderTest, Settings, engines
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, RequestType, TokenLogprobs, Tokens
from kvtransfer.extractor import extract
from kvtransfer.page_table import PageTable
from kvtransfer.ports import ReceiveRequest, WriterOutcome

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]
BLOCK, ROW = 16, 32 * 2  # head_dim of the model, two bytes an element
LENGTHS = (16, 75, 140)


def memory_of(engine: EngineUnderTest, table: PageTable, blocks: NDArray[np.int32]) -> NDArray[np.uint8]:
    """What the process has in these blocks: [runs, heads, tokens of all blocks, bytes of a row]."""
    (group,) = table.groups
    found: list[NDArray[np.uint8]] = []
    with Path(f"/proc/{engine.process.pid}/mem").open("rb", buffering=0) as memory:
        for view in range(len(group.views)):
            where = extract(blocks, table, 0, view)
            for address, length in zip(where.addresses.tolist(), where.lengths.tolist(), strict=True):
                memory.seek(address)
                found.append(np.frombuffer(memory.read(length), np.uint8))
    # Buffers one after the other, each with its blocks: [buffer, block, head, token, row].
    whole = np.concatenate(found).reshape(-1, len(blocks), 4, BLOCK, ROW)
    return whole.transpose(0, 2, 1, 3, 4).reshape(len(whole), 4, -1, ROW)


@pytest.fixture(name="pair", scope="module", params=["block_table", "radix"])
def _pair(request: pytest.FixtureRequest, llama: Path) -> Iterator[tuple[EnginePair, EngineUnderTest]]:
    """Two instances, and one that does both legs."""
    config: Settings = {
        "engine": {
            "kind": "torch",
            "num_threads": 1,
            "num_blocks": 64,
            "max_batch_tokens": 96,
            "prefix_caching": False,
        },
        "model": {"path": str(llama), "name": "llama", "dtype": "bfloat16"},
        "cache": {"manager": request.param},
        "logging": {"level": "WARNING"},
    }
    with engines() as make:
        alone = make(config)
        alone.ready()
        yield EnginePair(make, config), alone


@pytest.mark.parametrize("length", LENGTHS)
def test_bytes_and_log_probabilities(pair: tuple[EnginePair, EngineUnderTest], length: int) -> None:
    both, alone = pair
    prompt = np.random.default_rng(length).integers(4, 8192, length).tolist()
    leg, offer = both.prefill(prompt, 16, length, logprobs=1)
    both.generation.send(leg)
    wanted = both.generation.next_of(ReceiveRequest)
    notice = both.write(offer, wanted)
    assert notice.outcome is WriterOutcome.DELIVERED, notice.reason
    sent, arrived = (
        memory_of(engine, rank.page_table, lists[0].blocks)[:, :, :length]
        for engine, rank, lists in zip(
            (both.context, both.generation), both.ranks, (offer.sources, wanted.destinations), strict=True
        )
    )
    assert sent.nbytes == 8 * 2 * 4 * length * ROW
    assert sent.any(axis=3).all(), "no row of any head is empty"
    assert np.array_equal(sent, arrived)
    both.settle(leg, notice)

    plain = EngineRequest(
        RequestKey((1 << 41) + length), RequestType.CONTEXT_AND_GENERATION, tuple(prompt), leg.sampling
    )
    alone.run(plain)
    assert leg.context_phase is not None
    assert said(*leg.context_phase.first_tokens, *both.generation.chunks(leg.key)) == said(*alone.chunks(plain.key))


def said(*chunks: Tokens) -> list[tuple[int, TokenLogprobs]]:
    """Tokens of an answer, each with its log probability."""
    return [pair for chunk in chunks for pair in zip(chunk.ids, chunk.logprobs, strict=True)]
