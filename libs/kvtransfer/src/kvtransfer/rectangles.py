"""Disjoint rectangles tokens x layers of views. Rows of equal layers are kept together, so that neither a striped plan
(many rows of one layer) nor a chunked prompt (many spans of tokens in one row) is searched one by one."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvtransfer.ports import Extent

Span = tuple[int, int]


class _Row:
    """Spans of tokens of layers [begin, end), disjoint and sorted."""

    __slots__ = ("begin", "end", "spans")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.spans: list[Span] = []

    def meets(self, begin: int, end: int) -> Span | None:
        """A span that shares a token with [begin, end)."""
        at = bisect_left(self.spans, (end, 0)) - 1
        return self.spans[at] if at >= 0 and self.spans[at][1] > begin else None


class _Plane:
    """The rows of one view, sorted by their first layer."""

    __slots__ = ("_begins", "_rows", "_tallest")

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._rows: list[_Row] = []
        self._tallest = 0

    def near(self, extent: Extent) -> Iterator[_Row]:
        """Rows that share a layer with `extent`."""
        at = bisect_right(self._begins, extent.layer_begin - self._tallest)
        while at < len(self._rows) and self._begins[at] < extent.layer_end:
            if self._rows[at].end > extent.layer_begin:
                yield self._rows[at]
            at += 1

    def add(self, extent: Extent) -> None:
        for row in self.near(extent):
            if (row.begin, row.end) == (extent.layer_begin, extent.layer_end):
                break
        else:
            row = _Row(extent.layer_begin, extent.layer_end)
            at = bisect_left(self._begins, row.begin)
            self._begins.insert(at, row.begin)
            self._rows.insert(at, row)
            self._tallest = max(self._tallest, row.end - row.begin)
        insort(row.spans, (extent.tokens.begin, extent.tokens.end))


class Rectangles:
    """Extents of which no two share a (token, layer) of the same view; the caller asks `clash` before `add`."""

    def __init__(self, extents: Iterable[Extent] = ()) -> None:
        self._planes: dict[tuple[int, int], _Plane] = {}
        for extent in extents:
            self.add(extent)

    def add(self, extent: Extent) -> None:
        """Adds one that clashes with none."""
        self._planes.setdefault((extent.layer_group, extent.view), _Plane()).add(extent)

    def clash(self, extent: Extent) -> str:
        """What `extent` shares a (token, layer) with, empty when nothing."""
        for row in self._near(extent):
            span = row.meets(extent.tokens.begin, extent.tokens.end)
            if span is not None:
                return f"tokens [{span[0]}, {span[1]}) of layers [{row.begin}, {row.end})"
        return ""

    def covers(self, extent: Extent) -> bool:
        """True when one of the set contains all of `extent`."""
        for row in self._near(extent):
            span = row.meets(extent.tokens.begin, extent.tokens.end)
            inside = row.begin <= extent.layer_begin and extent.layer_end <= row.end
            if inside and span is not None and span[0] <= extent.tokens.begin and extent.tokens.end <= span[1]:
                return True
        return False

    def _near(self, extent: Extent) -> Iterable[_Row]:
        plane = self._planes.get((extent.layer_group, extent.view))
        return () if plane is None else plane.near(extent)
