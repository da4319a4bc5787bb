"""Parity on CUDA devices: float32 with TF32 off token for token, bf16 bit for bit where both sides are cut alike.

Needs two GPUs for all of it; with one the rows that need a second are skipped. Figures are printed (`-s`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from parity_fleet import Fleet, Shape, run_split
from parity_logprobs import compare_bfloat16
from parity_oracle import cases, expected
from tiny_models import tiny_model

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="session"),
]
VOCAB = 8192
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.fixture(scope="session", name="llama")
def _llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(
        tmp_path_factory.mktemp("models") / "llama-cuda",
        seed=5,
        vocab_size=VOCAB,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.05,
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session", name="fleet")
async def _fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Fleet, None]:
    async with Fleet(tmp_path_factory.mktemp("fleet"), max_ranks=8) as fleet:
        yield fleet


def on(model: Path, *devices: int, dtype: str = "float32") -> Shape:
    """A tensor-parallel instance with a rank on each of these devices."""
    named = ", ".join(f"'cuda:{device}'" for device in devices)
    settings = ("engine.device=cuda", f"parallel.devices=[{named}]", f"model.dtype={dtype}")
    return Shape(model, tp=len(devices), settings=settings)


ROWS = {
    "two ranks on one GPU to TP1": ((0, 0), (0,)),
    "TP1 to TP1 across GPUs": ((0,), (1,)),
    "TP2 over NCCL to TP1": ((0, 1), (1,)),
    "TP1 to TP2 over NCCL": ((0,), (0, 1)),
}


@pytest.mark.parametrize("row", [row if row.startswith("two") else pytest.param(row, marks=two_gpus) for row in ROWS])
async def test_float32(fleet: Fleet, llama: Path, row: str) -> None:
    context, generation = (on(llama, *devices) for devices in ROWS[row])
    wanted = cases(VOCAB)
    first, second = await fleet.pair(context, generation)
    found = await asyncio.gather(*(run_split(first, second, case, fleet.number()) for case in wanted))
    assert [tokens for tokens, _ in found] == expected(llama, wanted)
    print(f"\n{row}: path {found[0][1].handoff.path}")


# Three times what has been seen: see docs/parity.md.
BOUND = 0.25
LAST = torch.cuda.device_count() - 1
BF16_ROWS = {
    "TP1 to TP1": ((0,), (LAST,)),
    "two ranks on one GPU to TP1": ((0, 0), (0,)),
    "TP1 to two ranks on one GPU": ((0,), (0, 0)),
    "TP2 over NCCL to TP1": ((0, 1), (LAST,)),
}


@pytest.mark.parametrize("row", [pytest.param(row, marks=two_gpus) if "NCCL" in row else row for row in BF16_ROWS])
async def test_bfloat16(fleet: Fleet, llama: Path, row: str) -> None:
    """Cut alike, every log probability is the same float: the cache has arrived bit for bit. Cut otherwise the sums of
    the layers are rounded otherwise: the first token's error comes from the context instance, the others' from the
    cache it has sent."""
    context, generation = (on(llama, *devices, dtype="bfloat16") for devices in BF16_ROWS[row])
    found = await compare_bfloat16(fleet, context, generation)
    print(f"\n{row}: {found}")
    if row == "TP1 to TP1":
        assert found.identical
    assert found.steps >= found.steps_in_all / 3
    assert found.largest < BOUND
