"""The mock model's arithmetic, vectorised. All of it is uint64 arithmetic modulo 2^64.

    base(token, position)        = mix(mix(seed) ^ (token * A + position * B))
    word(token, position, inner) = mix(base(token, position) ^ salt(inner))      inner = (layer, K or V, word)
    state(n)                     = sum over positions p < n:  weight(p) * sum over inner:  coefficient(inner) * word
                                   of a layer with a window only over p >= n - window
    next token after n tokens    = 32 + mix(state(n) + n * C) mod 95             printable ASCII

Weights and coefficients are odd: one wrong word always changes the state, and words at exchanged positions do too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Odd constants of the splitmix64 generator and of the golden ratio family.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
TOKEN = np.uint64(0x9E3779B97F4A7C15)
POSITION = np.uint64(0xD1B54A32D192ED03)
LENGTH = np.uint64(0x8CB92BA72F3D8DD7)
_SALT = np.uint64(0x53414C5453414C54)
_COEFFICIENT = np.uint64(0x434F454646494349)
_WEIGHT = np.uint64(0x5745494748545F5F)

FIRST_CHARACTER = 32
CHARACTERS = 95


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: a bijection whose every output bit depends on every input bit."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def numbered(kind: np.uint64, count: int) -> NDArray[np.uint64]:
    """`count` pseudo-random words of one kind, uint64[count]."""
    return mix(mix(kind + np.arange(count, dtype=np.uint64) * TOKEN))


def salts(count: int) -> NDArray[np.uint64]:
    """salt(inner), uint64[count]."""
    return numbered(_SALT, count)


def coefficients(count: int) -> NDArray[np.uint64]:
    """coefficient(inner), odd, uint64[count]."""
    return numbered(_COEFFICIENT, count) | np.uint64(1)


def weights(count: int) -> NDArray[np.uint64]:
    """weight(position), odd, uint64[count]."""
    return numbered(_WEIGHT, count) | np.uint64(1)


def bases(seed: int, tokens: NDArray[Any], positions: NDArray[Any]) -> NDArray[np.uint64]:
    """base(token, position), uint64[N]."""
    key = mix(np.array([seed], np.uint64))
    return mix(key ^ (tokens.astype(np.uint64) * TOKEN + positions.astype(np.uint64) * POSITION))


def next_tokens(states: NDArray[np.uint64], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """The token after `lengths` tokens in state `states`, int64[N] in [32, 126]."""
    drawn = mix(states + lengths.astype(np.uint64) * LENGTH) % np.uint64(CHARACTERS)
    return drawn.astype(np.int64) + FIRST_CHARACTER
