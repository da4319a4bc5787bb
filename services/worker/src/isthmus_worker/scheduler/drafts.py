"""Draft tokens: what may come next, guessed from what was said before, and how many of the guesses were right. Pure.

The context leg looks where its last tokens stood before and takes what followed there (prompt lookup). The guesses go
over with the first token. The generation leg computes first token and guesses in one step, draws a token behind each of
them as it would without guesses, and keeps them as long as they are what was guessed, and one more:

    computed   first  d1  d2  d3
    drawn      d1     d2  x   -       d1 and d2 were right, x takes the place of d3, what was drawn behind d3 is nothing

A token depends on what stands before it and on its position alone, so the text is the same as without drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from isthmus_worker.engine import Tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_worker.runner import Drawn

# Longer beginnings are better guesses; one token alone is none.
_LONGEST, _SHORTEST = 3, 2


def look_up(tokens: NDArray[np.int64], count: int) -> tuple[int, ...]:
    """At most `count` tokens that followed the last place where the last tokens stood before; () when there is none."""
    for size in range(min(_LONGEST, len(tokens) - 1), _SHORTEST - 1, -1):
        places = np.flatnonzero((sliding_window_view(tokens[:-1], size) == tokens[-size:]).all(1))
        if len(places):
            begin = int(places[-1]) + size
            return tuple(tokens[begin : begin + count].tolist())
    return ()


def joined(chunks: Sequence[Tokens]) -> Tokens:
    """Chunks of one answer that follow each other, as one."""
    ids = tuple(token for chunk in chunks for token in chunk.ids)
    return Tokens(ids, chunks[0].sample, tuple(one for chunk in chunks for one in chunk.logprobs), chunks[-1].reason)


def kept(drawn: Sequence[Drawn], drafts: Sequence[int]) -> int:
    """How many of the draws behind the last token and each draft count: up to the first one that no draft foresaw."""
    for index, draft in enumerate(drafts):
        if drawn[index].token != draft:
            return index + 1
    return len(drawn)
