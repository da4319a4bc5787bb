"""Sampling once more, slow and plain: one token at a time, Python loops, nothing of `isthmus_worker.sampling`."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from isthmus_worker.engine import Sampling


def random_number(seed: int, sample: int, position: int) -> float:
    """The middle of one of 2^52 cells of (0, 1)."""
    cell = xxhash.xxh3_64_intdigest(struct.pack("<3Q", seed, sample, position)) >> 12
    return (2 * cell + 1) / (1 << 53)


def changed(
    logits: NDArray[np.float32], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """After bias, penalties and minimum length; in float32, as the engine computes."""
    single, found = np.float32, [np.float32(value) for value in logits]
    for token, bias in sampling.logit_bias:
        found[token] = single(found[token] + single(bias))
    if sampling.repetition_penalty != 1:
        penalty = single(sampling.repetition_penalty)
        with np.errstate(over="ignore"):
            for token in {*prompt, *output}:
                value = found[token] / penalty if found[token] > 0 else found[token] * penalty
                found[token] = min(value, np.finfo(single).max)
    for token, times in Counter(output).items():
        found[token] -= single(times * sampling.frequency_penalty + sampling.presence_penalty)
    if len(output) < sampling.min_tokens:
        for token in sampling.stop_token_ids:
            found[token] = single("-inf")
    return [float(value) for value in found]


def distribution(logits: Sequence[float], sampling: Sampling) -> list[float]:
    """Probability of each token after temperature, min-p, top-k and top-p."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    best = logits[order[0]]
    if sampling.temperature == 0:
        first = min(token for token in order if logits[token] == best)
        return [float(token == first) for token in range(len(logits))]
    weights = [math.exp((value - best) / sampling.temperature) for value in logits]
    kept = [token for token in order if weights[token] >= sampling.min_p]
    if 0 < sampling.top_k < len(kept):
        last = logits[kept[sampling.top_k - 1]]
        kept = [token for token in kept if logits[token] >= last]
    if sampling.top_p < 1:
        goal = sampling.top_p * math.fsum(weights[token] for token in kept)
        reached, count = 0.0, 0
        while reached < goal and count < len(kept):
            reached += weights[kept[count]]
            count += 1
        last = logits[kept[count - 1]]
        kept = [token for token in kept if logits[token] >= last]
    total = math.fsum(weights[token] for token in kept)
    chosen = set(kept)
    return [weights[token] / total if token in chosen else 0.0 for token in range(len(logits))]


def draw(probabilities: Sequence[float], number: float) -> int:
    """The first token, in the order of ids, at which the probabilities so far exceed `number`."""
    reached = 0.0
    for token, probability in enumerate(probabilities):
        reached += probability
        if probability and reached > number:
            return token
    return max(token for token, probability in enumerate(probabilities) if probability)


def chi_square_limit(cells: int) -> float:
    """What chi-square with cells - 1 degrees of freedom exceeds once in a million runs (Wilson and Hilferty)."""
    free = cells - 1
    return free * (1 - 2 / (9 * free) + 4.753 * math.sqrt(2 / (9 * free))) ** 3


def chi_square(observed: Sequence[int], probabilities: Sequence[float]) -> float:
    """Over cells of probability above 0; the others must be empty. Cells with few hits expected are taken together."""
    total = sum(observed)
    assert all(not count for count, probability in zip(observed, probabilities, strict=True) if probability == 0)
    pairs = sorted((p * total, count) for count, p in zip(observed, probabilities, strict=True) if p)
    few = [pair for pair in pairs if pair[0] < 5]
    rest = [pair for pair in pairs if pair[0] >= 5]
    if few:
        rest.append((sum(expected for expected, _ in few), sum(count for _, count in few)))
    return sum((count - expected) ** 2 / expected for expected, count in rest)
