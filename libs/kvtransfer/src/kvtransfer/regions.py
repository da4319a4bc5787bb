"""Runs of bytes as struct of arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Regions:
    """Run i is [addresses[i], addresses[i] + lengths[i]) in one process. int64[N] both."""

    addresses: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def nbytes(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class RegionPairs:
    """Run i moves lengths[i] bytes from src[i] to dst[i]. int64[N] each."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Sum of all lengths."""
        return int(self.lengths.sum())

    @property
    def sources(self) -> Regions:
        """The reading side."""
        return Regions(self.src, self.lengths)

    @property
    def destinations(self) -> Regions:
        """The written side."""
        return Regions(self.dst, self.lengths)

    @classmethod
    def empty(cls) -> RegionPairs:
        """Nothing to move."""
        none = np.empty(0, np.int64)
        return cls(none, none, none)
