"""The connector in a worker process of vLLM: describes the cache, runs the transfer agent beside the model.

Bytes are moved by the agent's thread, on the orders of the hub. All that vLLM's hooks do is to carry what the scheduler
side has been told back to the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from isthmus_core.process import leave
from kvtransfer.agents import make_agent
from kvtransfer.errors import GeometryError
from kvtransfer.integrations.vllm.cache_groups import Place, SourcedGroup, cache_groups
from kvtransfer.integrations.vllm.page_tables import AttentionLayers, Described, StateLayers, describe
from kvtransfer.integrations.vllm.repack import Packed
from kvtransfer.page_table import MemoryKind
from kvtransfer.rank_info import InstanceRole
from kvtransfer.transceiver.agent_thread import AgentThread
from kvtransfer.transceiver.rank_memory import bounce_policy, probe_policy

if TYPE_CHECKING:
    from kvtransfer.bounce.settings import BounceSettings
    from kvtransfer.integrations.vllm.block_lists import Blocks
    from kvtransfer.local.client import Connection
    from kvtransfer.rank_info import Topology

log = logging.getLogger(__name__)

# The agent's thread shares the interpreter with the model's: it must not wait 5 ms for its turn.
_SWITCH_INTERVAL_S = 5e-4
_STOP_S = 2.0
# Exit code of a process whose agent or hub is gone: nobody could promise any more that its writes are over.
AGENT_FAILED = 4

GroupFacts = tuple[tuple[int, int, int, bool], ...]


class ConnectorWorker:
    """One rank. `packs`: the cache is kept in an order of its kernels, a plain copy lies beside it."""

    def __init__(
        self, connection: Connection, topology: Topology, place: Place, chunks: BounceSettings, *, packs: bool = False
    ) -> None:
        self._connection, self._topology, self._place = connection, topology, place
        self._chunks, self._packs = chunks, packs
        self._packed: Packed | None = None
        self._sources: list[int] = []
        self._thread: AgentThread | None = None
        self._serving = False
        # Of each layer group: (vLLM's group, ratio of block sizes, tokens of a block or 0 for a state, windowed).
        self.groups: GroupFacts = ()

    @property
    def rank(self) -> int:
        """Flat rank."""
        return self._topology.flat_rank

    def register(self, config: Any, kv_caches: Mapping[str, Any]) -> None:
        """register_kv_caches: the cache never moves from here on. Raises GeometryError, AgentError, and ArenaError when
        the device has no room for chunks."""
        cache = _tensor(next(iter(kv_caches.values())))
        memory, device = _where(cache)
        own_order = "as vLLM's kernels for CPUs keep them" if memory is MemoryKind.DRAM and not self._packs else ""
        groups = cache_groups(config, kv_caches, self._place, own_order)
        described = self._describe(groups, memory, device)
        self.groups = _facts(groups, described)
        welcome, rank = self._connection.welcome, self._topology.flat_rank
        sends, region = welcome.role is InstanceRole.CONTEXT, described.table.regions[0]
        bouncing, arenas = bounce_policy(self._chunks, region, sends=sends, receives=not sends)
        probing, scratch = probe_policy(region, on_connect=welcome.probe, require_path=welcome.require_path)
        self._kept = (*arenas, *scratch)
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        sock = socket.socket(fileno=self._connection.sock.detach())
        sock.settimeout(None)
        self._thread = AgentThread(
            sock,
            lambda: make_agent(welcome.backend, welcome.here.instance_id),
            described.table,
            rank,
            self._topology,
            on_exit=self._ended,
            probing=probing,
            bouncing=bouncing,
        )
        self._thread.start()
        self._serving = True
        log.info("rank %d of %s: %s", rank, welcome.here.instance_id, _text(groups, described))

    def _describe(self, groups: list[SourcedGroup], memory: MemoryKind, device: int) -> Described:
        if not self._packs:
            return describe([one.group for one in groups], memory, device)
        attention = [one.group for one in groups if isinstance(one.group, AttentionLayers)]
        if len(attention) != len(groups):
            raise GeometryError("kv_cache_groups", "a recurrent state", "only attention is packed; set repack false")
        self._packed, self._sources = Packed(attention), [one.source for one in groups]
        return Described(self._packed.table(), (1,) * len(groups))

    def pack(self, blocks: Blocks) -> None:
        """A complete prompt into the plain copy; blocks by vLLM's groups."""
        if self._packed is not None:
            self._packed.pack([blocks[source] for source in self._sources])

    def unpack(self, blocks: Blocks) -> None:
        """What has come in the plain copy into vLLM's cache."""
        if self._packed is not None:
            self._packed.unpack([blocks[source] for source in self._sources])

    def shutdown(self) -> None:
        """Ends the agent's thread; writes that are open end with the process."""
        self._serving = False
        if self._thread is not None:
            self._thread.stop()
            self._thread.join(_STOP_S)

    def _ended(self, error: BaseException | None) -> None:
        """A rank dies with its hub, and with its agent."""
        if self._serving:
            end_process("the hub is gone" if error is None else f"the transfer agent failed: {error}")


def end_process(reason: str) -> NoReturn:
    """Says why and leaves, whatever becomes of the words: who would read them may be what has gone."""
    with contextlib.suppress(OSError, ValueError):
        print(reason, file=sys.stderr, flush=True)
    leave(AGENT_FAILED)


def _tensor(cache: Any) -> Any:
    """A tensor of a layer's cache, which is one or, for a state, a list of them."""
    return cache if hasattr(cache, "device") else cache[0]


def _where(cache: Any) -> tuple[MemoryKind, int]:
    """Kind of memory and number of the device of a tensor."""
    device = cache.device
    return (MemoryKind.DRAM, 0) if device.type == "cpu" else (MemoryKind.VRAM, device.index or 0)


def _facts(groups: list[SourcedGroup], described: Described) -> GroupFacts:
    return tuple(
        (one.source, ratio, 0, False)
        if isinstance(one.group, StateLayers)
        else (one.source, ratio, one.group.block // ratio, one.group.window is not None)
        for one, ratio in zip(groups, described.ratios, strict=True)
    )


def _text(groups: list[SourcedGroup], described: Described) -> str:
    kinds = [
        f"{len(group.global_layer_ids)} layers of {described.table.num_blocks(number)} blocks "
        f"({', '.join(sorted({view.mapper_kind.name for view in group.views}))})"
        for number, group in enumerate(described.table.groups)
    ]
    return "; ".join(kinds) or f"{len(groups)} groups"
