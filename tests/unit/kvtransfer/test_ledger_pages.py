"""The ledger: a page leaves an attempt only through the writers of that attempt."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_storage import Shape, Storage, rank_info
from kvtransfer.errors import LedgerError
from kvtransfer.ledger import Ledger, PageState
from kvtransfer.ports import RankBlocks, RequestKey, WriterOutcome

A, B = RequestKey(1 << 40), RequestKey((1 << 40) + 1)
RETRY = RequestKey(1 << 40, 1)
ME, OTHER = b"m" * 16, b"o" * 16
W0, W1 = (0, 0), (1, 1)
DONE = WriterOutcome.DELIVERED


def pages(*ids: int, rank: int = 0, group: int = 0) -> tuple[RankBlocks, ...]:
    return (RankBlocks(rank, group, np.array(ids, np.int32)),)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger({(0, 0): 8, (1, 0): 8, (0, 1): 4})


def exposed(ledger: Ledger, key: RequestKey = A, *ids: int, writers=(W0, W1)) -> None:
    ledger.reserve(key, pages(*(ids or (1, 2))), ME, now=1.0)
    ledger.expose(key, writers, now=2.0)


def test_life_of_an_attempt(ledger: Ledger):
    ledger.reserve(A, pages(1, 2, -1), ME, now=1.0)
    assert (ledger.state(A), ledger.pages(A)) == (PageState.RESERVED, 2)
    ledger.expose(A, [W0, W1], now=2.0)
    assert ledger.waiting_for(A) == (W0, W1)
    assert ledger.settle(A, W0, DONE, now=3.0) is False
    assert ledger.held()[PageState.EXPOSED] == 2
    assert ledger.oldest(now=5.0) == {PageState.EXPOSED: 3.0}
    assert ledger.settle(A, W1, WriterOutcome.NEVER_STARTED, now=4.0) is True
    assert ledger.state(A) is PageState.SETTLED
    ledger.check_integrity()
    ledger.release(A)
    assert ledger.is_empty
    assert ledger.capacity == 20
    ledger.check_integrity()


@pytest.mark.parametrize("state", ["exposed", "in doubt", "one writer left"])
def test_pages_under_writers_are_not_released(ledger: Ledger, state: str):
    exposed(ledger)
    if state == "in doubt":
        ledger.doubt(A, now=3.0)
    if state == "one writer left":
        ledger.settle(A, W0, DONE, now=3.0)
    with pytest.raises(LedgerError, match="writers"):
        ledger.release(A)
    assert ledger.pages(A) == 2


def test_released_once(ledger: Ledger):
    exposed(ledger, writers=(W0,))
    ledger.settle(A, W0, DONE, now=3.0)
    ledger.release(A)
    with pytest.raises(LedgerError, match="holds no pages"):
        ledger.release(A)


@pytest.mark.parametrize("key", [B, RETRY])
def test_exposed_page_is_not_exposed_again(ledger: Ledger, key: RequestKey):
    exposed(ledger, A, 1, 2)
    with pytest.raises(LedgerError, match=r"page 2 .* attempt 1099511627776/0 has exposed for 8\.000 s"):
        ledger.reserve(key, pages(3, 2), ME, now=10.0)
    assert ledger.state(key) is None
    ledger.reserve(key, pages(3, 4), ME, now=10.0)


def test_reservation_that_never_escaped_is_undone_whole(ledger: Ledger):
    ledger.reserve(A, pages(1, 2), ME, now=1.0)
    ledger.release(A)
    assert ledger.is_empty
    ledger.reserve(B, pages(1, 2), ME, now=2.0)


def test_late_and_foreign_notices_change_nothing(ledger: Ledger):
    exposed(ledger)
    assert ledger.settle(B, W0, DONE, now=3.0) is False
    assert ledger.settle(A, (5, 5), DONE, now=3.0) is False
    ledger.settle(A, W0, DONE, now=3.0)
    assert ledger.settle(A, W0, DONE, now=3.0) is False
    assert ledger.waiting_for(A) == (W1,)


def test_doubt_is_settled_by_writers_or_proof_of_their_death(ledger: Ledger):
    exposed(ledger)
    ledger.doubt(A, now=3.0)
    assert ledger.held()[PageState.IN_DOUBT] == 2
    ledger.reconcile(A, now=4.0)
    ledger.doubt(A, now=5.0)
    ledger.settle(A, W0, DONE, now=6.0)
    with pytest.raises(LedgerError, match="written by incarnation"):
        ledger.prove_dead(A, OTHER, now=7.0)
    ledger.prove_dead(A, ME, now=7.0)
    assert ledger.state(A) is PageState.SETTLED
    ledger.check_integrity()


def test_no_writers_means_settled(ledger: Ledger):
    exposed(ledger, writers=())
    assert ledger.state(A) is PageState.SETTLED


@pytest.mark.parametrize(
    ("blocks", "says"),
    [
        (pages(8), "there are 8"),
        (pages(-2), "page -2"),
        (pages(1, 1), "twice"),
        (pages(1, rank=7), "no layer group 0 on rank 7"),
        (pages(1) + pages(2), "lists layer group 0 of rank 0 twice"),
    ],
)
def test_wrong_lists_are_refused(ledger: Ledger, blocks: tuple[RankBlocks, ...], says: str):
    with pytest.raises(LedgerError, match=says):
        ledger.reserve(A, blocks, ME, now=1.0)
    assert ledger.is_empty
    ledger.check_integrity()


def test_steps_out_of_order_are_refused(ledger: Ledger):
    with pytest.raises(LedgerError, match="holds no pages"):
        ledger.expose(A, [W0], now=1.0)
    exposed(ledger)
    with pytest.raises(LedgerError, match="exposed"):
        ledger.expose(A, [W0], now=2.0)
    with pytest.raises(LedgerError, match="exposed"):
        ledger.reconcile(A, now=2.0)
    with pytest.raises(LedgerError, match="holds pages already"):
        ledger.reserve(A, pages(5), ME, now=2.0)


def test_groups_over_the_same_bytes_share_their_pages():
    ledger = Ledger({(0, 0): 4, (0, 1): 8}, {(0, 0): "pool", (0, 1): "pool"})
    ledger.reserve(A, pages(3, group=0), ME, now=1.0)
    ledger.check_integrity()
    with pytest.raises(LedgerError, match="page 3"):
        ledger.reserve(B, pages(3, group=1), ME, now=1.0)
    ledger.reserve(B, pages(7, group=1), ME, now=1.0)
    ledger.check_integrity()


def test_capacity_comes_from_the_ranks():
    tables = [Storage(Shape(), "layer_major", blocks).page_table() for blocks in (8, 8)]
    ledger = Ledger.of([rank_info(table, rank, tp=2) for rank, table in enumerate(tables)])
    assert ledger.capacity == 16


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 6)), max_size=60))
def test_whatever_is_tried_pages_and_attempts_agree(steps: list[tuple[int, int, int]]):
    ledger = Ledger({(0, 0): 6})
    for now, (step, who, page) in enumerate(steps):
        key = RequestKey((1 << 40) + who)
        try:
            match step:
                case 0:
                    ledger.reserve(key, pages(page, (page + 1) % 6), ME, now)
                case 1:
                    ledger.expose(key, [W0, W1][: page % 3], now)
                case 2:
                    ledger.settle(key, (W0, W1)[page % 2], DONE, now)
                case 3:
                    ledger.doubt(key, now)
                case 4:
                    ledger.prove_dead(key, ME, now)
                case _:
                    if ledger.state(key) in (PageState.EXPOSED, PageState.IN_DOUBT):
                        with pytest.raises(LedgerError):
                            ledger.release(key)
                    else:
                        ledger.release(key)
        except LedgerError:
            pass
        ledger.check_integrity()
        assert sum(ledger.held().values()) <= 6
