"""The building blocks of a Llama layer, as plain functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


# More rows than this are an ordinary matrix product.
_MAX_TURNED_ROWS = 64


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T for x [N, in] and weight [out, in]; the result may be a transposed view.

    Decode multiplies few rows with a tall matrix, and in float32 the CPU's libraries are slow at exactly that. Turned
    round (tall times thin) they are not: 8 rows 1.2 to 2 times, 2 rows 10 times faster on two cores of AVX-512. For one
    row their matrix-vector kernel reads memory at less than half its speed; cut into a batch of two products it is not
    chosen.
    """
    rows, (out_size, in_size) = x.shape[0], weight.shape
    if rows > _MAX_TURNED_ROWS or x.dtype != torch.float32 or x.device.type != "cpu":
        return functional.linear(x, weight)
    if rows == 1 and out_size % 2 == 0:
        return torch.bmm(weight.view(2, out_size // 2, in_size), x.t().expand(2, in_size, 1)).view(1, out_size)
    return torch.mm(weight, x.t()).t()


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
