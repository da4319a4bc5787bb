"""Rotary position embedding: the frequencies of each scaling scheme, and the rotation itself.

A scheme changes the frequencies, and yarn the length of the rotated vectors too; nothing else of a model depends on it.
`dynamic` scaling changes frequencies only beyond the model's own context length. Longer requests are refused, so it is
the plain scheme here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SCHEMES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """`theta` is the base. The other fields are those of the scheme, and at these values where it has none.

    `original_context`: the context length of the model before it was stretched by `factor`. `low` and `high`: between
    which numbers of turns over the original context a frequency is interpolated (llama3 and yarn). `truncate`: yarn's
    interval of dimensions is rounded to whole ones. `scale`: what cos and sin are multiplied with.
    """

    theta: float
    scheme: str = "default"
    factor: float = 1.0
    original_context: int = 0
    low: float = 0.0
    high: float = 0.0
    truncate: bool = True
    scale: float = 1.0

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position, float32[head_dim / 2], highest first."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.scheme == "linear":
            return plain / self.factor
        if self.scheme in ("llama3", "yarn"):
            kept = self._kept_by_turns(plain) if self.scheme == "llama3" else self._kept_by_dimension(head_dim)
            return plain / self.factor * (1 - kept) + plain * kept
        return plain

    def _kept_by_turns(self, plain: Tensor) -> Tensor:
        """llama3: 0 where a frequency is divided by the factor, 1 where it is kept; a ramp over its turns between."""
        turns = self.original_context * plain / (2 * math.pi)
        return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)

    def _kept_by_dimension(self, head_dim: int) -> Tensor:
        """yarn: the same, but the ramp goes over the dimensions."""

        def dimension(turns: float) -> float:
            context = math.log(self.original_context / (turns * 2 * math.pi))
            return head_dim * context / (2 * math.log(self.theta))

        first, last = dimension(self.high), dimension(self.low)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        # A ramp of no width is a step.
        width = last - first or 0.001
        return 1 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)

    def tables(self, head_dim: int, length: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and signed sin of positions [0, length), [length, 1, head_dim] each. The lower half of sin is negated."""
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.frequencies(head_dim))
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(device, dtype)[:, None], sin.to(device, dtype)[:, None]


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """What yarn multiplies cos and sin with to keep the sharpness of attention over a stretched context."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place: x [N, heads, head_dim], cos and signed sin [N, 1, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)
