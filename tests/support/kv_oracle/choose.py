"""Where the draws come from: a fixed number of bytes, made from a seed or drawn (and shrunk) by hypothesis.

One flat string of bytes on purpose: hypothesis copies parts of a structured draw to other places of it, which would
make source and destination alike far too often.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

ENTROPY = 512  # bytes of one case; about twice of what the largest takes


class Chooser:
    """Two bytes a choice. Behind the last byte everything is the first, simplest choice."""

    def __init__(self, entropy: bytes) -> None:
        self._entropy = entropy
        self._at = 0

    def one_of(self, options: Sequence[T]) -> T:
        """One of the options, evenly; simplest first, because hypothesis shrinks towards zero bytes."""
        if len(options) == 1:
            return options[0]
        number = int.from_bytes(self._entropy[self._at : self._at + 2], "big")
        self._at += 2
        return options[number % len(options)]

    def between(self, low: int, high: int) -> int:
        """An integer from low to high, both included, evenly."""
        return self.one_of(range(low, high + 1))


def from_seed(seed: int) -> bytes:
    """The same bytes for the same seed, on every version of every library."""
    return random.Random(seed).randbytes(ENTROPY)
