"""The tree of everything that is here: a node for each block of tokens, below the node of the block before it. Pure.

                 root
                /    \
           [0,T) A    [0,T) B          pages (full, window): one for each block list, -1 where there is none.
          full 7       full 2          A window's page may go while the node stays: prompts that go on long enough
          win  -                       behind it do not need it.
         /       \
    [T,2T) A1   [T,2T) A2
    full 3      full 9
    win  1      win  4
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus_core.errors import InternalError
from isthmus_worker.cache.base import NO_BLOCK


class Node:
    """`name`: key of all tokens up to the end of its block; `pages`: of each block list."""

    __slots__ = ("children", "name", "pages", "parent")

    def __init__(self, name: bytes, parent: Node | None, lists: int) -> None:
        self.name, self.parent = name, parent
        self.children: dict[bytes, Node] = {}
        self.pages = [NO_BLOCK] * lists


class RadixTree:
    """Nodes, and the node of each page. `leading`: the list whose pages decide which names can be found."""

    def __init__(self, lists: int, leading: int) -> None:
        self._lists, self._leading = lists, leading
        self._root = Node(b"", None, lists)
        self._nodes: dict[bytes, Node] = {}
        self._of_page: list[dict[int, Node]] = [{} for _ in range(lists)]
        # Names of which the state is another one than at the last `take_changes`: are they there?
        self._changes: dict[bytes, bool] = {}

    @property
    def names(self) -> int:
        """Names that can be found."""
        return len(self._of_page[self._leading])

    def named(self, number: int, page: int) -> bool:
        """True when a page of a list belongs to a node."""
        return page in self._of_page[number]

    def walk(self, names: Sequence[bytes]) -> Iterator[Node]:
        """The nodes of the longest known beginning of a chain of names."""
        node = self._root
        for name in names:
            found = node.children.get(name)
            if found is None:
                return
            yield found
            node = found

    def grow(self, names: Sequence[bytes], first: int) -> list[Node]:
        """The nodes of names[first:], made where they are missing."""
        parent = self._nodes.get(names[first - 1]) if first else self._root
        if parent is None:
            first, parent, known = 0, self._root, first
        else:
            known = 0
        nodes: list[Node] = []
        for name in names[first:]:
            node = parent.children.get(name)
            if node is None:
                node = parent.children[name] = self._nodes[name] = Node(name, parent, self._lists)
            nodes.append(node)
            parent = node
        return nodes[known:]

    def attach(self, node: Node, number: int, page: int) -> None:
        """Gives a page without a node to a node without a page of this list."""
        if node.pages[number] != NO_BLOCK or page in self._of_page[number]:
            raise InternalError(f"block {page} of list {number} has a name already, or its node has a block")
        node.pages[number] = page
        self._of_page[number][page] = node
        if number == self._leading:
            self._note(node.name, there=True)

    def detach(self, number: int, page: int) -> None:
        """Takes a page from its node; nothing when it has none. Nodes that nobody needs go."""
        node = self._of_page[number].pop(page, None)
        if node is None:
            return
        node.pages[number] = NO_BLOCK
        if number == self._leading:
            self._note(node.name, there=False)
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Removes a node, and those above it, as far as they have neither pages nor children."""
        while node.parent is not None and not node.children and all(page == NO_BLOCK for page in node.pages):
            if node.parent.children.pop(node.name, None) is None:
                return  # it has gone already
            del self._nodes[node.name]
            node = node.parent

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Names that are there, and that are not there any more, since the last call. A name is in one of the two."""
        changes, self._changes = self._changes, {}
        stored = tuple(name for name, there in changes.items() if there)
        return stored, tuple(name for name, there in changes.items() if not there)

    def _note(self, name: bytes, *, there: bool) -> None:
        if name in self._changes:
            del self._changes[name]  # there and gone again, or the other way round
        else:
            self._changes[name] = there

    def check_integrity(self) -> None:
        """Raises InternalError unless every node hangs in the tree, has a use, and owns the pages that name it."""
        seen = 0
        for node in self._nodes.values():
            parent = node.parent
            if parent is None or parent.children.get(node.name) is not node:
                raise InternalError("the tree of prefixes is broken: a node hangs below nobody")
            if not node.children and all(page == NO_BLOCK for page in node.pages):
                raise InternalError("the tree of prefixes is broken: a leaf without a block")
            for number, page in enumerate(node.pages):
                if page != NO_BLOCK:
                    seen += 1
                    if self._of_page[number].get(page) is not node:
                        raise InternalError(f"block {page} of list {number} belongs to another node than its own")
        if seen != sum(map(len, self._of_page)):
            raise InternalError(f"{seen} blocks in the tree of prefixes, {sum(map(len, self._of_page))} have a node")
