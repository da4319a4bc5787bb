"""What the mock engine must say, in plain Python: an independent second implementation of its definition.

The definition is in the docstrings of `isthmus_worker.mock_engine.hashing` and `draws`; no code of them is used here.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import xxhash

from isthmus_worker.engine import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31


def _numbered(name: bytes, index: int) -> int:
    return _mix(_mix(int.from_bytes(name, "big") + index * _GOLDEN))


def _drawn(best: int, sampling: Sampling, sample: int, position: int, made: Sequence[int]) -> int:
    """What is chosen where the model's best character is `best`; `made`: the answer so far."""
    number = 0.0
    if sampling.temperature > 0:
        hashed = xxhash.xxh3_64_intdigest(struct.pack("<3Q", sampling.seed, sample, position))
        number = (2 * (hashed >> 12) + 1) / (1 << 53)
    never = {token for token, bias in sampling.logit_bias if bias == -100}
    if len(made) < sampling.min_tokens:
        never |= set(sampling.stop_token_ids)
    for steps in range(95):
        token = 32 + (best - 32 + int(number * 95) + steps) % 95
        if token not in never:
            return token
    return 32 + (best - 32 + int(number * 95)) % 95


def oracle(
    prompt: Sequence[int],
    n: int,
    *,
    seed: int = 0,
    layers: int = 2,
    bytes_per_token: int = 8,
    window: int | None = None,
    sampling: Sampling | None = None,
    sample: int = 0,
) -> list[int]:
    """The first `n` tokens after `prompt`, whatever the block size, the chunks and the instances that compute them.

    `seed`, `layers`, `bytes_per_token`, `window`: of the model. `sample`: which answer of a request with `sampling`
    (greedy); stop tokens do not end it.
    """
    inner = layers * 2 * bytes_per_token // 8
    salts = [_numbered(b"SALTSALT", index) for index in range(inner)]
    coefficients = [_numbered(b"COEFFICI", index) | 1 for index in range(inner)]
    key = _mix(seed)
    tokens = list(prompt)
    # Layers that see everything, and those with a window: what each position adds to the state.
    per_layer = inner // layers
    added: list[tuple[int, int]] = []
    for position in range(len(prompt) + n - 1):
        base = _mix(key ^ (tokens[position] * _GOLDEN + position * 0xD1B54A32D192ED03) & _MASK)
        words = (_mix(base ^ salt) for salt in salts)
        parts = [0, 0]
        for index, (coefficient, word) in enumerate(zip(coefficients, words, strict=True)):
            parts[window is not None and index // per_layer % 2] += coefficient * word
        weight = _numbered(b"WEIGHT__", position) | 1
        added.append((weight * parts[0], weight * parts[1]))
        length = position + 1
        seen = added[-window:] if window else added
        state = (sum(full for full, _ in added) + sum(part for _, part in seen)) & _MASK
        if length >= len(prompt):
            best = 32 + _mix(state + length * 0x8CB92BA72F3D8DD7) % 95
            made = tokens[len(prompt) :]
            tokens.append(best if sampling is None else _drawn(best, sampling, sample, length, made))
    return tokens[len(prompt) :]


def printable_prompts(count: int, seed: int, longest: int = 600) -> list[list[int]]:
    """`count` prompts of 1 to `longest` tokens that are bytes of printable text."""
    draw = random.Random(seed)
    return [[draw.randrange(32, 127) for _ in range(draw.randint(1, longest))] for _ in range(count)]
