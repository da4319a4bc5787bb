"""A NIXL agent whose writes go wrong on order, for real rank processes: registered as any other agent is, by an entry
point, so that nothing in the product knows of it.

    faults = Faults(tmp_path)           # worker(..., "transfer.backend=faulty", **faults.environment)
    faults.order(1, "half", 2)          # the next 2 writes of rank 1 move half of their bytes and fail
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvtransfer.agents.base import Operation, WriteHandle, WriteState, WriteStatus
from kvtransfer.agents.nixl import NixlAgent
from kvtransfer.errors import AgentError
from kvtransfer.regions import RegionPairs

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvtransfer.agents.nixl import NixlWrite

_FOLDER = "FAULTY_AGENT_FOLDER"


class Faults:
    """The orders to the agents of the workers that are started with `environment`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        package = folder / "faulty_agent-1.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-agent\nVersion: 1\n")
        (package / "entry_points.txt").write_text("[kvtransfer.agents]\nfaulty = faulty_agent:FaultyAgent\n")
        known = os.environ.get("PYTHONPATH", "")
        path = os.pathsep.join([str(Path(__file__).parent), str(folder), *([known] if known else [])])
        self.environment = {"PYTHONPATH": path, _FOLDER: str(folder)}

    def order(self, rank: int, fault: str, times: int = 1) -> None:
        """`half`: half of the bytes arrive, and the write has failed. `refuse`: nothing is posted."""
        for number in range(times):
            (self._folder / f"{rank}-{number}.order").write_text(fault)

    @contextmanager
    def held(self, rank: int) -> Generator[None]:
        """Meanwhile every write of the rank is in flight, whether or not its bytes have arrived."""
        hold = self._folder / f"{rank}.hold"
        hold.touch()
        try:
            yield
        finally:
            hold.unlink()

    @property
    def left(self) -> int:
        """Orders that no write has met yet."""
        return len(list(self._folder.glob("*.order")))


class FaultyAgent(NixlAgent):
    """See `Faults`. The label of a rank ends with its number."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._folder, self._rank = Path(os.environ[_FOLDER]), label.rpartition("-")[2]
        self._hold = self._folder / f"{self._rank}.hold"
        self._failed: set[NixlWrite] = set()

    def submit(self, pairs: RegionPairs, remote: str, operation: Operation = Operation.WRITE) -> NixlWrite:
        fault = self._next_order()
        if fault == "refuse":
            raise AgentError("planted: the agent refuses")
        if fault == "half":
            lengths = (pairs.lengths + 1) // 2
            pairs = RegionPairs(pairs.src, pairs.dst, lengths)
        write = super().submit(pairs, remote, operation)
        if fault == "half":
            self._failed.add(write)
        return write

    def poll(self, handle: WriteHandle) -> WriteStatus:
        write = self._mine(handle)
        if self._hold.exists():
            return WriteStatus(WriteState.IN_FLIGHT)
        status = super().poll(handle)
        if status.state is WriteState.DONE and write in self._failed:
            return WriteStatus(WriteState.FAILED, f"planted: rank {self._rank} has written half")
        return status

    def release(self, handle: WriteHandle) -> None:
        write = self._mine(handle)
        super().release(handle)
        self._failed.discard(write)

    def _next_order(self) -> str:
        for path in sorted(self._folder.glob(f"{self._rank}-*.order")):
            fault = path.read_text()
            path.unlink()
            return fault
        return ""
