"""The rank role beside the scheduler: the thread that owns the transfer agent and its socket to the hub."""

from __future__ import annotations

import socket
import sys
import threading
from typing import TYPE_CHECKING

from isthmus_core.errors import ConfigError, StartError
from isthmus_core.process import leave
from isthmus_worker.engine_process.bouncing import bounce_settings
from isthmus_worker.parallel.shard import topology_of
from kvtransfer.agents import make_agent
from kvtransfer.errors import AgentUnknown, ArenaError, KVTransferError
from kvtransfer.transceiver.agent_thread import AgentThread
from kvtransfer.transceiver.rank_memory import bounce_policy, probe_policy

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from kvtransfer.page_table import PageTable
    from kvtransfer.transceiver.layer_progress import LayerProgress

# Exit code when the transfer agent has failed while serving.
AGENT_FAILED = 4


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
        label, transfer = config.worker.instance_id or config.worker.role, config.transfer
        sends, receives = config.worker.role != "generation", config.worker.role != "context"
        require_path, cache = transfer.require_path or "", page_table.regions[0]
        try:
            bouncing, arenas = bounce_policy(bounce_settings(config), cache, sends=sends, receives=receives)
            probing, scratch = probe_policy(cache, on_connect=transfer.probe_on_connect, require_path=require_path)
        except ArenaError as error:
            raise ConfigError(str(error)) from error
        self._kept = (*arenas, *scratch)
        self._serving = threading.Event()
        self._thread = AgentThread(
            socket.socket(fileno=fd),
            lambda: make_agent(backend, f"{label}-{rank}" if config.parallel.world_size > 1 else label),
            page_table,
            rank,
            topology_of(config.parallel, rank),
            on_exit=self._ended,
            probing=probing,
            bouncing=bouncing,
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

    def stop(self, timeout_s: float) -> None:
        """Ends the thread. Writes that are open then end with the process."""
        self._thread.stop()
        self._thread.join(timeout_s)

    def _ended(self, error: BaseException | None) -> None:
        if error is not None and self._serving.is_set():
            print(f"the transfer agent failed: {error}", file=sys.stderr)
            leave(AGENT_FAILED)
