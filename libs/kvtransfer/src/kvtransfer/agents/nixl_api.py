"""NIXL's Python package: loaded, typed as far as it is used here, and probed for what it can do."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvtransfer.agents.base import AgentCapabilities
from kvtransfer.agents.nixl_env import possible_paths
from kvtransfer.errors import AgentUnavailable
from kvtransfer.page_table import MemoryKind

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Microseconds that the progress thread sleeps between two looks. Measured: no slower than 0 over CMA and TCP, and an
# idle process uses 2 % of a core instead of all it can get.
PROGRESS_PAUSE_US = 100
# As descriptor lists are made, and as backends say what they support.
NAMES = {
    MemoryKind.DRAM: "DRAM",
    MemoryKind.VRAM: "VRAM",
    MemoryKind.BLOCK: "BLOCK",
    MemoryKind.OBJECT: "OBJ",
    MemoryKind.FILE: "FILE",
}
_SEGMENTS = {
    "DRAM_SEG": MemoryKind.DRAM,
    "VRAM_SEG": MemoryKind.VRAM,
    "BLK_SEG": MemoryKind.BLOCK,
    "OBJ_SEG": MemoryKind.OBJECT,
    "FILE_SEG": MemoryKind.FILE,
}


class Nixl(Protocol):
    """The part of nixl_agent that is used here. Descriptor lists and handles are opaque."""

    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def check_remote_metadata(self, agent: str, descs: object) -> bool: ...
    def make_connection(self, remote_agent: str) -> None: ...
    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...
    def send_notif(self, remote_agent_name: str, notif_msg: bytes) -> None: ...
    def get_new_notifs(self) -> dict[str, list[bytes]]: ...
    def get_plugin_list(self) -> list[str]: ...
    def get_backend_mem_types(self, backend: str) -> list[str]: ...


class _PatientBindings:
    """NIXL's bindings, except that the progress thread of a new agent pauses between two looks."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> object:
        config.pthrDelay = PROGRESS_PAUSE_US
        return self._bindings.nixlAgent(name, config)


def load(wheel: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """The module of a wheel and everything that it raises on purpose. Raises AgentUnavailable."""
    try:
        api = importlib.import_module(f"{wheel}._api")
        bindings = importlib.import_module(f"{wheel}._bindings")
    except ImportError as error:
        raise AgentUnavailable(f"{wheel} can not be loaded: {error}") from error
    return api, tuple(
        cast("type[Exception]", value)
        for name, value in vars(bindings).items()
        if name.startswith("nixl") and name.endswith("Error")
    )


def open_agent(api: Any, name: str) -> Nixl:
    """A new agent over UCX. NIXL's Python class sets the pause of the progress thread to 0, with which every idle
    process keeps a core busy, and takes no other value: it sees patient bindings while it starts."""
    # Writes need progress at their target too: the progress thread stays on.
    config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
    bindings = api.nixlBind
    api.nixlBind = _PatientBindings(bindings)
    try:
        return cast("Nixl", api.nixl_agent(name, config))
    finally:
        api.nixlBind = bindings


def probe(wheel: str, nixl: Nixl, tls: str, rdma: bool) -> AgentCapabilities:
    """What this agent can do on this machine."""
    kinds = frozenset(_SEGMENTS[name] for name in nixl.get_backend_mem_types("UCX") if name in _SEGMENTS)
    return AgentCapabilities(
        engine=f"{wheel} {importlib.metadata.version(wheel)}",
        memory_kinds=kinds,
        paths=possible_paths(tls, rdma, MemoryKind.VRAM in kinds),
        plugins=tuple(sorted(nixl.get_plugin_list())),
        backends=("UCX",),
    )
