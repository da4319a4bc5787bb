"""One number per byte of the model's cache, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kv_oracle.model import Attention, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kv_oracle.model import Model, Part

INNER = 1 << 32


class Codes:
    """code = number of (group, part, layer) * 2^32 + (token, buffer, head, byte) or (row, section, unit, byte)."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._numbers: dict[tuple[int, int, int], int] = {}
        for g, group in enumerate(model.groups):
            for p in range(len(group.parts)):
                for layer in group.layers:
                    self._numbers[g, p, layer] = len(self._numbers)
        self.keys = list(self._numbers)

    def attention(self, part: Part, key: tuple[int, int, int], token: int, buffer: int, head: int) -> int:
        """Code of the first byte of one head of one token; the others follow."""
        inner = ((token * part.buffers + buffer) * max(1, part.heads) + head) * part.unit
        return self._numbers[key] * INNER + inner

    def recurrent(self, state: State, key: tuple[int, int, int], row: int, section: int, unit: int) -> int:
        """Code of the first byte of one unit of a section in a row."""
        before = sum(s.units * s.unit_bytes for s in state.sections[:section])
        total = sum(s.units * s.unit_bytes for s in state.sections)
        inner = row * total + before + unit * state.sections[section].unit_bytes
        return self._numbers[key] * INNER + inner

    def grids(self, codes: NDArray[np.int64], prompt: int) -> dict[tuple[int, int, int], NDArray[np.bool_]]:
        """(group, part, layer) -> which tokens the codes belong to, bool[prompt]; bool[1] for recurrent state."""
        found: dict[tuple[int, int, int], NDArray[np.bool_]] = {}
        named = codes[codes >= 0]
        number = named // INNER
        for n in sorted(set[int](number.tolist())):
            key = self.keys[n]
            group = self._model.groups[key[0]]
            if isinstance(group, Attention):
                part = group.parts[key[1]]
                per_token = part.buffers * max(1, part.heads) * part.unit
                grid = np.zeros(prompt, bool)
                grid[(named[number == n] % INNER) // per_token] = True
            else:
                grid = np.ones(1, bool)
            found[key] = grid
        return found
