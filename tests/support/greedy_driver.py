"""Drives a ModelRunner without scheduler: block tables, chunked prefill and mixed batches by hand; and the oracle."""

# torch and transformers are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from isthmus_worker.cache.layout import CacheOptions, CacheShape, LayerGroups
from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw, Drawn, ModelRunner
from kvtransfer.page_table import HeadInterval

if TYPE_CHECKING:
    import torch

    from isthmus_worker.torch_engine.model_config import ModelConfig

_NO_TOKENS: NDArray[np.int64] = np.zeros(0, np.int64)
# One greedy token; what the penalties would look at is not needed.
GREEDY = (Draw(Sampling(max_tokens=1), 0, _NO_TOKENS, _NO_TOKENS),)


class GreedySequence:
    """One request: hands out the row of its next step and takes the token."""

    def __init__(self, prompt: Sequence[int], blocks: Sequence[int], chunk: int = 1 << 30) -> None:
        self.tokens = list(prompt)
        self.prompt_len = len(self.tokens)
        self.done = 0
        self.blocks: NDArray[np.int32] = np.array(blocks, np.int32)
        self.chunk = chunk

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.prompt_len :]

    def row(self) -> BatchRow:
        """The next chunk of the prompt, or the last token."""
        end = min(self.done + self.chunk, len(self.tokens))
        ids = np.array(self.tokens[self.done : end], np.int64)
        return BatchRow(ids, self.done, (self.blocks,), GREEDY if end == len(self.tokens) else ())

    def take(self, row: BatchRow, drawn: Sequence[Drawn]) -> None:
        """The result of `row`."""
        self.done += len(row.token_ids)
        assert len(drawn) == len(row.draws)
        self.tokens += [one.token for one in drawn]


def blocks_for(tokens: int, tokens_per_block: int = 16) -> int:
    """Blocks that hold `tokens`."""
    return -(-tokens // tokens_per_block)


def whole_shape(config: ModelConfig, dtype: torch.dtype, options: CacheOptions | None = None) -> CacheShape:
    """The cache of a model that is not split, in blocks of 16 tokens."""
    return CacheShape(
        tuple(range(config.layers)),
        LayerGroups.of(config.windows),
        HeadInterval(0, config.kv_heads),
        16,
        config.head_dim * dtype.itemsize,
        options or CacheOptions(),
    )


def run_greedy(runner: ModelRunner, sequences: Sequence[GreedySequence], new_tokens: int) -> list[list[int]]:
    """Steps all sequences together until each has `new_tokens` tokens."""
    while running := [one for one in sequences if len(one.generated) < new_tokens]:
        rows = [one.row() for one in running]
        for one, row, drawn in zip(running, rows, runner.execute(rows), strict=True):
            one.take(row, drawn)
    return [one.generated for one in sequences]


def open_oracle(folder: Path, dtype: str = "float32") -> Any:
    """The checkpoint in transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager")
    return model.eval()


def oracle_greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> list[int]:
    """What transformers' generate says, past end-of-sequence tokens too."""
    import torch

    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0].tolist()[len(prompt) :]
