"""What choosing the tokens of one step costs, beside the argmax that a greedy step can not do without.

    python benchmarks/sampling.py [--quick] [--json FILE]

Random logits over 128,256 tokens, float32 on the CPU; medians over interleaved rounds. "flat" logits are the worst case
of top-p: nearly all tokens take part.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from report import Row, argument_parser, at_most, interleaved, show

from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw
from isthmus_worker.sampling.sampler import draw_tokens

VOCAB = 128256
OUTPUT = 1000
SETTINGS = {
    "greedy": Sampling(1),
    "temperature": Sampling(1, temperature=0.8),
    "min-p 0.05": Sampling(1, temperature=0.8, min_p=0.05),
    "top-k 50": Sampling(1, temperature=0.8, top_k=50),
    "top-p 0.9": Sampling(1, temperature=0.8, top_p=0.9),
    "top-p 0.9, flat": Sampling(1, temperature=2.0, top_p=0.9),
    "greedy, penalties over 1,000 tokens": Sampling(1, presence_penalty=0.5, frequency_penalty=0.5),
    "greedy, 5 log probabilities": Sampling(1, logprobs=5),
}


def rows_of(sampling: Sampling, count: int) -> list[BatchRow]:
    """Decode rows of one draw each, with an output to penalise."""
    draw = np.random.default_rng(1)
    ids, blocks = np.zeros(1, np.int64), np.zeros(1, np.int32)
    outputs = draw.integers(0, VOCAB, (count, OUTPUT))
    return [
        BatchRow(ids, 99, (blocks,), (Draw(sampling, row, outputs[row, :9], outputs[row]),)) for row in range(count)
    ]


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def measure(count: int, rounds: int) -> list[Row]:
    """Rows of the report for steps of `count` sequences."""
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(0)) * 4
    flat = logits / 4
    cases: dict[str, Callable[[], float]] = {"argmax": partial(seconds, lambda: logits.max(-1)[1].tolist())}
    for name, sampling in SETTINGS.items():
        given = flat if "flat" in name else logits
        cases[name] = partial(seconds, partial(draw_tokens, given, rows_of(sampling, count)))
    with torch.inference_mode():
        interleaved(cases, 1)
        medians = {name: value * 1e3 for name, value in interleaved(cases, rounds).items()}
    best = medians["argmax"]
    found = [Row(f"{count} rows, argmax alone", best, "ms")]
    found.append(at_most(f"{count} rows, greedy", medians["greedy"], "ms", best, 1.1))
    found += [
        Row(f"{count} rows, {name}", medians[name], "ms", best, medians[name] / best)
        for name in SETTINGS
        if name != "greedy"
    ]
    return found


def main() -> None:
    """Measure, print."""
    arguments = argument_parser(__doc__).parse_args()
    rounds = 3 if arguments.quick else 15
    found = [row for count in (8, 64) for row in measure(count, rounds)]
    show(f"choosing tokens, {torch.get_num_threads()} threads", found, arguments.json)


if __name__ == "__main__":
    main()
