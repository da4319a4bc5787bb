"""`kv_storage.Storage` with a twin on a CUDA device: page tables name the twin, `memory` is the host's copy."""

# torch is typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kv_storage import GUARD, Storage
from kvtransfer.page_table import MemoryKind

if TYPE_CHECKING:
    from kvtransfer.page_table import RegisteredRegion


@dataclass
class DeviceStorage(Storage):
    """On device 0. Nothing is copied before `upload`."""

    twin: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.twin = torch.zeros(len(self.memory), dtype=torch.uint8, device="cuda:0")

    @property
    def base(self) -> int:
        """Address of the pools on the device."""
        return self.twin.data_ptr() + GUARD

    def _regions(self) -> tuple[RegisteredRegion, ...]:
        return tuple(replace(one, memory_kind=MemoryKind.VRAM, device_id=0) for one in super()._regions())

    def upload(self) -> None:
        """`memory` to the device; over when it returns."""
        self.twin.copy_(torch.from_numpy(self.memory))
        torch.cuda.synchronize()

    def download(self) -> bytes:
        """What is on the device now, by a stream that waits for no other one."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found = self.twin.to("cpu", non_blocking=True)
        side.synchronize()
        return found.numpy().tobytes()
