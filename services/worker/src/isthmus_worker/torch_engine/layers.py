"""The building blocks of a decoder layer, as plain functions on tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


# A packed matrix is the quicker one from this many rows on.
_PACKED_ROWS = 4
# More rows than this are an ordinary matrix product.
_MAX_TURNED_ROWS = 8


def product(x: Tensor, weight: Tensor, packed: Tensor | None = None) -> Tensor:
    """x @ weight.T for x [N, in] and weight [out, in]; the result may be a transposed view.

    Decode multiplies few rows with a matrix, and in float32 the CPU's libraries are slow at exactly that. For one row
    their matrix-vector kernel reads memory at half its speed; cut into a batch of two products it is not chosen. Two
    rows, and a few more with a tall matrix, are up to 3 times faster turned round (tall times thin). From 4 rows on,
    `pack`ed weights are 1.2 to 1.7 times faster than any of it.
    """
    rows, (out_size, in_size) = x.shape[0], weight.shape
    if packed is not None and rows >= _PACKED_ROWS:
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    if rows > _MAX_TURNED_ROWS or x.dtype != torch.float32 or x.device.type != "cpu":
        return functional.linear(x, weight)
    if rows == 1 and out_size % 2 == 0:
        return torch.bmm(weight.view(2, out_size // 2, in_size), x.t().expand(2, in_size, 1)).view(1, out_size)
    if rows == 2 or out_size > in_size:
        return torch.mm(weight, x.t()).t()
    return functional.linear(x, weight)


def pack(weight: Tensor) -> Tensor | None:
    """A copy of a float32 CPU matrix in the blocked order of oneDNN's kernels; None where there is no such order."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, _MAX_TURNED_ROWS)


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x @ weight.T + bias, weight [out, in], bias [out] or None. `packed`: see `pack`."""

    weight: Tensor
    bias: Tensor | None
    packed: Tensor | None = None

    @staticmethod
    def empty(out_size: int, in_size: int, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        """Memory for the weights, to be loaded."""
        weight = torch.empty(out_size, in_size, dtype=dtype, device=device)
        return Linear(weight, torch.empty(out_size, dtype=dtype, device=device) if bias else None)

    def with_packed(self) -> Linear:
        """The same with its packed copy."""
        return replace(self, packed=pack(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        y = product(x, self.weight, self.packed).contiguous()
        return y if self.bias is None else y.add_(self.bias)

    def multiply(self, x: Tensor) -> Tensor:
        """x @ weight.T alone: a summand of what several ranks make together."""
        return product(x, self.weight, self.packed)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual + self(x)."""
        y = product(x, self.weight, self.packed)
        return residual + (y if self.bias is None else y.add_(self.bias))


def gated_silu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, for [N, 2 * size] with the gate first."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
