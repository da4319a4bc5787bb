"""Host memory that the CUDA driver locks: let go before the pages go, and missed without harm."""

from __future__ import annotations

import gc

import pytest
import torch

from kvtransfer.bounce.memory import HostPages


class Driver:
    """Refuses what is locked already, as the real one does."""

    def __init__(self) -> None:
        self.locked: set[int] = set()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.locked:
            return 712
        self.locked.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_pages_are_unlocked_before_their_address_is_given_away(driver: Driver):
    for _ in range(8):
        pages = HostPages(1 << 20)
        # A pair whose caches lie on devices never asks for it.
        assert driver.locked == set()
        assert pages.lock() == pages.lock() == ""
        assert driver.locked == {pages.region.base_address}
        del pages
        gc.collect()
        assert driver.locked == set()


def test_a_driver_that_locks_nothing_says_so_and_is_not_asked_again(driver: Driver):
    driver.cudaHostRegister = lambda *_: 2  # type: ignore[method-assign]
    pages = HostPages(1 << 20)
    problem = pages.lock()
    assert "CUDA locks no 1048576 bytes" in problem
    assert "(error 2)" in problem
    driver.cudaHostRegister = lambda *_: 0  # type: ignore[method-assign]
    assert pages.lock() == problem


def test_pages_that_the_agent_has_locked_are_left_to_it(driver: Driver):
    pages = HostPages(1 << 20)
    driver.cudaHostRegister(pages.region.base_address, 1 << 20, 0)  # as UCX does when they are registered with NIXL
    assert pages.lock() == ""
    del pages
    gc.collect()
    assert len(driver.locked) == 1
