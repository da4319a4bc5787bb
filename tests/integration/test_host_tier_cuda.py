"""Kernels between device memory and an arena on the host, on a GPU: what goes to peers whose cache is on the host."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
import torch

from bounce_case import PAIRS, BounceCase
from device_storage import DeviceStorage
from kvtransfer.bounce.memory import HostPages
from kvtransfer.pools import MemoryKind

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
]


def wait_for(copy: Copy) -> None:
    deadline = time.monotonic() + 60
    while not copy.done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@pytest.mark.parametrize("name", PAIRS)
def test_chunks_on_the_host_move_what_a_direct_write_moves(name: str) -> None:
    pytest.importorskip("triton")
    from kvtransfer.bounce.cuda_copying import CudaCopier

    torch.cuda.init()
    copier, pages = CudaCopier(0), HostPages(1 << 20)
    assert pages.lock() == pages.lock() == ""
    arena = pages.region
    case = BounceCase(name, 3, DeviceStorage)
    assert arena.memory_kind is MemoryKind.DRAM
    case.src.upload()
    case.dst.upload()
    wait_for(copier.gather(case.source, 0, case.source.nbytes, arena.base_address))
    wait_for(copier.scatter(case.target, 0, case.target.nbytes, arena.base_address))
    assert case.dst.download() == case.expected()
