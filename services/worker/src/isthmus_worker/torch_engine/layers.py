"""The building blocks of a Llama layer, as plain functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


# Row counts for which `product` turns the multiplication round. Measured with float32 on two cores of AVX-512: 2 rows 10
# times, 8 rows 1.2 to 2 times, 64 rows 1.3 times faster; one row and bfloat16 have kernels of their own.
_TURNED_ROWS = range(2, 65)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x [N, in] and weight [out, in]. Decode batches are few rows against a tall matrix, and CPU
    libraries are much better at "tall times thin" than at "thin times tall"."""
    if x.shape[0] in _TURNED_ROWS and x.dtype == torch.float32 and x.device.type == "cpu":
        return torch.mm(weight, x.t()).t()
    return functional.linear(x, weight)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias, weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @staticmethod
    def empty(out_size: int, in_size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        """Memory for the weights, to be loaded."""
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        return Linear(weight, torch.empty(out_size, dtype=dtype, device=device) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        y = product(x, self.weight).contiguous()
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)."""
        y = product(x, self.weight)
        return residual + (y if self.bias is None else y.add_(self.bias))


def rope_tables(
    head_dim: int, theta: float, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and signed sin for positions [0, length), each [length, 1, head_dim]: the lower half of sin is negated."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    return cos.to(device, dtype)[:, None], sin.to(device, dtype)[:, None]


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotary embedding in place: x [N, heads, head_dim], cos and signed sin [N, 1, head_dim]."""
    swapped = x.roll(x.shape[-1] // 2, -1)
    x.mul_(cos).addcmul_(swapped, sin)


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for [N, 2 * size] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
