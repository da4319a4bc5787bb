"""Decode only from a complete manifest: what counts as complete, and what is a contradiction."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import ManifestError
from kvtransfer.manifest import Manifest, Need
from kvtransfer.ports import Extent, TokenRange


def box(begin: int, end: int, low: int = 0, high: int = 4, view: int = 0, group: int = 0) -> Extent:
    return Extent(group, view, TokenRange(begin, end), low, high)


NEED = Need.of({(0, 0): [box(0, 10), box(0, 10, view=1)], (1, 1): [box(0, 10)]})


def test_complete_only_when_every_writer_and_view_is_there():
    manifest = Manifest(NEED)
    for pair, part in (((0, 0), box(0, 10)), ((0, 0), box(0, 10, view=1)), ((1, 1), box(0, 10))):
        assert not manifest.complete
        manifest.add(*pair, [part])
    assert manifest.complete
    assert manifest.missing == 0


def test_empty_need_is_complete_without_a_writer():
    assert Manifest(Need.of({})).complete
    empty = Need.of({(0, 0): [box(5, 5)]})
    assert empty.writers == ()
    assert Manifest(empty).complete


def test_repeats_change_nothing():
    manifest = Manifest(NEED)
    for _ in range(3):
        manifest.add(0, 0, [box(0, 10), box(0, 10)])
    assert manifest.missing == 80


@pytest.mark.parametrize(
    "extent", [box(0, 11), box(0, 10, 0, 5), box(0, 10, view=2), box(0, 10, group=1), box(3, 3), box(0, 10, 2, 2)]
)
def test_what_was_not_asked_for_is_refused_and_changes_nothing(extent):
    manifest = Manifest(NEED)
    with pytest.raises(ManifestError):
        manifest.add(0, 0, [box(0, 10), extent])
    assert manifest.missing == 120
    manifest.add(0, 0, [box(0, 10)])
    assert manifest.missing == 80


def test_the_wrong_writer_is_refused():
    with pytest.raises(ManifestError, match="not asked for"):
        Manifest(NEED).add(0, 1, [box(0, 10)])


def test_conflicting_overlap_is_refused():
    manifest = Manifest(NEED)
    manifest.add(0, 0, [box(0, 6)])
    with pytest.raises(ManifestError, match="over"):
        manifest.add(0, 0, [box(5, 10)])
    with pytest.raises(ManifestError, match="over"):
        manifest.add(1, 1, [box(0, 6), box(5, 10)])


def test_a_need_that_names_bytes_twice_is_refused():
    with pytest.raises(ManifestError, match="twice"):
        Need.of({(0, 0): [box(0, 6), box(5, 10)]})


@given(st.lists(st.integers(1, 9), unique=True), st.lists(st.integers(1, 3), unique=True), st.randoms())
def test_any_cut_in_any_order_completes_exactly_with_the_last_part(columns, rows, rng):
    xs, ys = [0, *sorted(columns), 10], [0, *sorted(rows), 4]
    parts = [box(a, b, c, d) for a, b in pairwise(xs) for c, d in pairwise(ys)]
    rng.shuffle(parts)
    manifest = Manifest(Need.of({(0, 0): [box(0, 10)]}))
    for part in parts:
        assert not manifest.complete
        manifest.add(0, 0, [part])
        manifest.add(0, 0, [part])
    assert manifest.complete
