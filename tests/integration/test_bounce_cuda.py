"""The kernels of the chunks on a GPU: every pair of layouts, cut anywhere, byte by byte, and behind a kernel that takes
long. `compute-sanitizer` runs this file."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import pytest
import torch

from bounce_case import PAIRS, BounceCase
from device_storage import DeviceStorage

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copy
    from kvtransfer.bounce.cuda_copying import CudaCopier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
]
# About a fifth of a second on an H200.
LONG_CYCLES = 400_000_000


def wait_for(copy: Copy) -> None:
    deadline = time.monotonic() + 60
    while not copy.done():
        assert time.monotonic() < deadline
        time.sleep(1e-4)


@pytest.fixture(name="copier", scope="module")
def _copier() -> CudaCopier:
    pytest.importorskip("triton")
    from kvtransfer.bounce.cuda_copying import CudaCopier

    return CudaCopier(0)


@pytest.mark.parametrize("parts", [1, 2, 7])
@pytest.mark.parametrize("name", PAIRS)
def test_the_kernels_move_what_a_direct_write_moves(copier: CudaCopier, name: str, parts: int) -> None:
    case = BounceCase(name, parts, DeviceStorage)
    case.src.upload()
    case.dst.upload()
    cuts = [case.source.nbytes * part // parts for part in range(parts + 1)]
    for begin, end in itertools.pairwise(cuts):
        if begin < end:
            chunk = torch.zeros(end - begin, dtype=torch.uint8, device="cuda:0")
            torch.cuda.synchronize()
            wait_for(copier.gather(case.source, begin, end, chunk.data_ptr()))
            wait_for(copier.scatter(case.target, begin, end, chunk.data_ptr()))
    assert case.dst.download() == case.expected()


def test_a_scatter_behind_a_long_kernel_is_not_over_before_it(copier: CudaCopier) -> None:
    """Whoever decodes waits for the scatter's event: it must not be there before the bytes are."""
    case = BounceCase("larger blocks", 1, DeviceStorage)
    case.src.upload()
    case.dst.upload()
    chunk = torch.zeros(case.source.nbytes, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    wait_for(copier.gather(case.source, 0, case.source.nbytes, chunk.data_ptr()))
    before = case.dst.download()
    with torch.cuda.stream(copier._stream):  # pyright: ignore[reportPrivateUsage]
        torch.cuda._sleep(LONG_CYCLES)  # pyright: ignore[reportPrivateUsage]
    copy = copier.scatter(case.target, 0, case.target.nbytes, chunk.data_ptr())
    assert not copy.done()
    assert case.dst.download() == before
    wait_for(copy)
    assert case.dst.download() == case.expected() != before
