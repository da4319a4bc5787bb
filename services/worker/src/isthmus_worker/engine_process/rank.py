"""The rank role beside the scheduler: the thread that owns the transfer agent and its socket to the hub."""

from __future__ import annotations

import socket
import sys
import threading
from typing import TYPE_CHECKING

from isthmus_core.errors import ConfigError, StartError
from isthmus_core.process import leave
from isthmus_worker.engine_process.bouncing import bounce_policy
from isthmus_worker.parallel.shard import topology_of
from kvtransfer.agents import make_agent
from kvtransfer.errors import AgentUnknown, ArenaError, KVTransferError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.transceiver.agent_thread import AgentThread
from kvtransfer.transceiver.probing import SCRATCH_BYTES, ProbePolicy, host_scratch

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from kvtransfer.page_table import PageTable
    from kvtransfer.transceiver.layer_progress import LayerProgress

# Exit code when the transfer agent has failed while serving.
AGENT_FAILED = 4


def device_scratch(device_id: int) -> tuple[RegisteredRegion, object]:
    """Scratch memory on a CUDA device, and the tensor that keeps it."""
    import torch  # the mock engine runs without it

    tensor = torch.zeros(SCRATCH_BYTES, dtype=torch.uint8, device=f"cuda:{device_id}")
    torch.cuda.synchronize(device_id)
    return RegisteredRegion(tensor.data_ptr(), SCRATCH_BYTES, MemoryKind.VRAM, device_id), tensor


class RankRole:
    """Starts the agent thread over inherited file descriptor `fd`; it registers the cache and tells the hub.

    When the thread fails later, the process ends at once: nobody but the kernel can then promise that posted writes
    are over. Raises ConfigError or StartError.
    """

    def __init__(
        self,
        config: IsthmusConfig,
        fd: int,
        page_table: PageTable,
        rank: int = 0,
        layers: LayerProgress | None = None,
    ) -> None:
        backend = config.transfer.backend
        if backend is None:
            raise ConfigError(f"worker.role = {config.worker.role} needs transfer.backend, for example nixl")
        label = config.worker.instance_id or config.worker.role
        try:
            policy, self._arenas = bounce_policy(config, page_table.regions[0])
        except ArenaError as error:
            raise ConfigError(str(error)) from error
        self._serving = threading.Event()
        self._thread = AgentThread(
            socket.socket(fileno=fd),
            lambda: make_agent(backend, f"{label}-{rank}" if config.parallel.world_size > 1 else label),
            page_table,
            rank,
            topology_of(config.parallel, rank),
            on_exit=self._ended,
            probing=self._probing(config, page_table),
            bouncing=policy,
            layers=layers,
        )
        try:
            self._thread.start()
            self._serving.set()
            if (failure := self._thread.failure) is not None:
                raise failure
        except AgentUnknown as error:
            raise ConfigError(f"transfer.backend = {backend}: {error}") from error
        except KVTransferError as error:
            raise StartError(f"transfer.backend = {backend}: {error}") from error

    def _probing(self, config: IsthmusConfig, page_table: PageTable) -> ProbePolicy:
        """Scratch memory of the kind the cache lies in, so that a measurement takes the way of the cache; beside a
        device also on the host, the way to peers whose cache lies there."""
        transfer, cache = config.transfer, page_table.regions[0]
        made: list[tuple[RegisteredRegion, object]] = [host_scratch()]
        if cache.memory_kind is MemoryKind.VRAM:
            made.insert(0, device_scratch(cache.device_id))
        self._scratch = made
        regions = [one[0] for one in made]
        on_host = regions[1] if len(regions) > 1 else None
        return ProbePolicy(regions[0], transfer.probe_on_connect, transfer.require_path or "", on_host)

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. Writes that are open then end with the process."""
        self._thread.stop()
        self._thread.join(timeout_s)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and self._serving.is_set():
            print(f"the transfer agent failed: {error}", file=sys.stderr)
            leave(AGENT_FAILED)
