"""What a radix tree has of a prompt.

A prompt can begin behind n blocks that are here when the lists without a window have all n of them, and those with one
have what the next token sees. Of a prompt that a peer writes each list takes what it has.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from isthmus_worker.cache.base import NO_BLOCK, Prefix, first_seen

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from isthmus_worker.cache.radix_tree import Node, RadixTree


class RadixPrefixes:
    """Look-ups in `tree`, whose block lists have these `windows`. Changes nothing."""

    def __init__(self, tree: RadixTree, windows: Sequence[int | None], tokens_per_block: int) -> None:
        self._tree, self._windows, self._tokens_per_block = tree, windows, tokens_per_block
        self._numbers = range(len(windows))

    def find(self, names: Sequence[bytes]) -> Prefix:
        """The longest known beginning that can be gone on behind."""
        nodes = self._walk(names)
        windowed = [number for number in self._numbers if self._windows[number] is not None]
        for count in range(len(nodes), 0, -1):
            position = count * self._tokens_per_block
            if all(self._has(nodes, number, position, count) for number in windowed):
                return Prefix(tuple(self._pages(nodes, number, position, count) for number in self._numbers))
        return Prefix(tuple(np.empty(0, np.int32) for _ in self._numbers))

    def find_received(self, names: Sequence[bytes], position: int) -> Prefix:
        """What each list has of what a token at `position` sees, up to the first block that is missing."""
        nodes = self._walk(names)
        lists: list[NDArray[np.int32]] = []
        for number in self._numbers:
            first = self._first(number, position)
            here = sum(1 for _ in takewhile(lambda node: node.pages[number] != NO_BLOCK, nodes[first:]))  # noqa: B023
            lists.append(self._pages(nodes, number, position, first + here))
        return Prefix(tuple(lists))

    def _walk(self, names: Sequence[bytes]) -> list[Node]:
        """Nodes of the beginning that lists without a window have."""
        full = [number for number in self._numbers if self._windows[number] is None]
        return list(
            takewhile(lambda node: all(node.pages[number] != NO_BLOCK for number in full), self._tree.walk(names))
        )

    def _has(self, nodes: Sequence[Node], number: int, position: int, end: int) -> bool:
        return all(node.pages[number] != NO_BLOCK for node in nodes[self._first(number, position) : end])

    def _pages(self, nodes: Sequence[Node], number: int, position: int, end: int) -> NDArray[np.int32]:
        pages = np.full(end, NO_BLOCK, np.int32)
        first = self._first(number, position)
        pages[first:] = [node.pages[number] for node in nodes[first:end]]
        return pages

    def _first(self, number: int, position: int) -> int:
        return first_seen(self._windows[number], position, self._tokens_per_block)
