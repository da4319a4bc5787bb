"""Arenas, and what copies between an arena and the cache, by kind of memory."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvtransfer.bounce.copying import Copier, HostCopier
from kvtransfer.errors import AgentUnavailable, ArenaError
from kvtransfer.pools import MemoryKind, RegisteredRegion

if TYPE_CHECKING:
    from collections.abc import Iterator


log = logging.getLogger(__name__)


# Of an arena whose size nobody chose (on the host also beside a cache on a device). On a device four chunks of 128 MiB
# and more keep a fast link busy.
HOST_ARENA, DEVICE_ARENA, DEVICE_SHARE = 64 << 20, 512 << 20, 64
# Flags of cudaHostRegister.
_PORTABLE, _MAPPED = 1, 2
# Its error for memory that somebody in this process has registered.
_LOCKED_ALREADY = 712


def default_arena_bytes(cache: RegisteredRegion, unit_bytes: int, max_peers: int) -> int:
    """Bytes of an arena beside this cache: a unit for each peer, and what the memory can easily spare."""
    least = unit_bytes * max_peers
    if cache.memory_kind is not MemoryKind.VRAM:
        return host_arena_bytes(unit_bytes, max_peers)
    import torch

    _, total = torch.cuda.mem_get_info(cache.device_id)
    return max(least, min(DEVICE_ARENA, total // DEVICE_SHARE) // unit_bytes * unit_bytes)


def host_arena_bytes(unit_bytes: int, max_peers: int) -> int:
    """Bytes of an arena on the host."""
    return max(unit_bytes * max_peers, HOST_ARENA)


def make_arena(cache: RegisteredRegion, nbytes: int) -> tuple[RegisteredRegion, object]:
    """An arena in memory of the cache's kind, and what keeps it. Host pages that are never touched cost nothing.
    Raises ArenaError when the device has no room for it."""
    if cache.memory_kind is MemoryKind.VRAM:
        return _device_arena(cache.device_id, nbytes)
    array = np.zeros(nbytes, np.uint8)
    return RegisteredRegion(int(array.ctypes.data), nbytes, MemoryKind.DRAM), array


class HostPages:
    """Memory on the host for an arena beside a cache on a device. Pages of this process, not of the driver: the kernel
    must be able to copy them to a peer. They cost nothing, and CUDA knows nothing of them, before `lock`."""

    def __init__(self, nbytes: int) -> None:
        self._pages = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        self._locked, self._problem = False, ""
        self.region = RegisteredRegion(int(self._pages.ctypes.data), nbytes, MemoryKind.DRAM)

    def lock(self) -> str:
        """Lets kernels reach them by their own address; once. Empty, or why it can not be: the same ever after."""
        if self._locked or self._problem:
            return self._problem
        import torch

        runtime, address = cast("Any", torch.cuda.cudart()), self.region.base_address
        error = int(runtime.cudaHostRegister(address, self.region.size_bytes, _PORTABLE | _MAPPED))
        if error == _LOCKED_ALREADY:
            # By the agent: UCX locks host memory that is registered with it, and lets go when that ends.
            self._locked = True
            _clear_error()
            return ""
        if error:
            self._problem = (
                f"CUDA locks no {self.region.size_bytes} bytes of host memory for an arena (error {error}): raise the "
                "limit of locked memory, or make transfer.max_peers smaller"
            )
            _clear_error()
            return self._problem
        self._locked = True
        # The address may be given out again, and CUDA must not believe that it is locked still.
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
        return ""


def _clear_error() -> None:
    """The next call into CUDA would be blamed for an error that has been dealt with."""
    import torch

    if torch.cuda.is_initialized():
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def make_copier(cache: RegisteredRegion) -> Copier:
    """Raises AgentUnavailable when the device's kernels can not be used: triton is not installed."""
    if cache.memory_kind is not MemoryKind.VRAM:
        return HostCopier()
    try:
        from kvtransfer.bounce.cuda_copying import CudaCopier
    except ImportError as error:
        raise AgentUnavailable(f"chunks in device memory need triton: {error}; pip install triton") from error
    return CudaCopier(cache.device_id)


def _device_arena(device_id: int, nbytes: int) -> tuple[RegisteredRegion, object]:
    import torch

    torch.cuda.init()
    try:
        with _plain_segments():
            tensor = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device_id}")
    except torch.OutOfMemoryError as error:
        raise ArenaError(
            f"device {device_id} has no room for an arena of {nbytes} bytes: make the cache or transfer.arena_bytes "
            "smaller (0: without)"
        ) from error
    torch.cuda.synchronize(device_id)
    return RegisteredRegion(tensor.data_ptr(), nbytes, MemoryKind.VRAM, device_id), tensor


class _plain_segments:  # used as a context manager
    """What is allocated inside can be shared by CUDA IPC, whatever the process has chosen for the rest."""

    def __enter__(self) -> None:
        chosen = ",".join(os.environ.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
        self._expandable = "expandable_segments:True" in chosen
        self._set("False")

    def __exit__(self, *_: object) -> None:
        self._set("True")

    def _set(self, value: str) -> None:
        import torch

        if self._expandable:
            torch.cuda.memory._set_allocator_settings(f"expandable_segments:{value}")  # pyright: ignore


def unshareable(regions: tuple[RegisteredRegion, ...]) -> Iterator[RegisteredRegion]:
    """Device memory that CUDA IPC can not share: torch's expandable segments. Writes to it, and from it, go through the
    host without a word, hundreds of times slower. Only what torch has allocated is known."""
    device = [one for one in regions if one.memory_kind is MemoryKind.VRAM]
    if not device:
        return
    import torch

    snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # pyright: ignore[reportUnknownMemberType]
    segments = [one for one in snapshot if one.get("is_expandable")]
    spans = [(int(one["address"]), int(one["address"]) + int(one["total_size"])) for one in segments]
    for region in device:
        if any(begin < region.end and region.base_address < end for begin, end in spans):
            yield region
