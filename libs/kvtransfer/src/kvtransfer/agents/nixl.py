"""NIXL over UCX. One thread owns it; with several ranks in a process every rank has its own agent.

NIXL reports failures by raising, handles are raw pointers that must never be used after their release, and releasing a
handle stops nothing. So: a handle is released only when its write is over, and set to None at that moment; what can not
be known is AgentBroken, never a guess.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from kvtransfer.agents.base import RegionIndex, WriteHandle, WriteState, WriteStatus
from kvtransfer.agents.naming import unique_agent_name
from kvtransfer.agents.nixl_env import (
    Place,
    can_read_process,
    choose_wheel,
    describe_path,
    has_rdma,
    installed_wheels,
    loaded_torch_cuda,
    pack_metadata,
    prepare_environment,
    unpack_metadata,
)
from kvtransfer.errors import AgentBroken, AgentError, AgentUnavailable, PeerLost
from kvtransfer.page_table import MemoryKind
from kvtransfer.rank_info import AgentDescriptor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs

BACKEND = "nixl"
# Microseconds that the progress thread sleeps between two looks. Measured: no slower than 0 over CMA and TCP, and an
# idle process uses 2 % of a core instead of all it can get.
PROGRESS_PAUSE_US = 100
# Raised by a post before anything has left: the write never started.
_NOT_POSTED = ("nixlInvalidParamError", "nixlNotFoundError", "nixlNotAllowedError", "nixlMismatchError")
# The endpoint is closed: everything that was on it is over.
_LOST = ("nixlRemoteDisconnectError", "nixlCancelledError")


class _Nixl(Protocol):
    """The part of nixl_agent that is used here. Descriptor lists and handles are opaque."""

    def register_memory(self, reg_list: NDArray[np.uint64], mem_type: str) -> object: ...
    def deregister_memory(self, dereg_list: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> bytes | str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def make_connection(self, remote_agent: str) -> None: ...
    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...


@dataclass(slots=True, eq=False)
class NixlWrite:
    """A posted write. `handle` is None from its release on."""

    owner: str
    remote: str
    handle: object | None
    status: WriteStatus


@dataclass(frozen=True, slots=True)
class _Remote:
    descriptor: AgentDescriptor
    index: RegionIndex
    path: str


class _PatientBindings:
    """NIXL's bindings, except that the progress thread of a new agent pauses between two looks."""

    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any) -> object:
        config.pthrDelay = PROGRESS_PAUSE_US
        return self._bindings.nixlAgent(name, config)


def _open(api: Any, name: str, config: object) -> _Nixl:
    """A new agent. NIXL's Python class sets the pause of the progress thread to 0, with which every idle process keeps
    a core busy, and takes no other value: it sees these bindings while it starts."""
    bindings = api.nixlBind
    api.nixlBind = _PatientBindings(bindings)
    try:
        return cast("_Nixl", api.nixl_agent(name, config))
    finally:
        api.nixlBind = bindings


class NixlAgent:
    """See `agents.base.Agent`. Raises AgentUnavailable when NIXL or UCX can not work on this machine."""

    def __init__(self, label: str) -> None:
        self._name = unique_agent_name(label)
        self._rdma = has_rdma()
        prepare_environment(os.environ, self._rdma)
        wheel = choose_wheel(loaded_torch_cuda(), installed_wheels())
        try:
            api = importlib.import_module(f"{wheel}._api")
            self._errors = tuple(
                cast("type[Exception]", value)
                for name, value in vars(importlib.import_module(f"{wheel}._bindings")).items()
                if name.startswith("nixl") and name.endswith("Error")
            )
        except ImportError as error:
            raise AgentUnavailable(f"{wheel} can not be loaded: {error}") from error
        try:
            # Writes need progress at their target too: the progress thread stays on.
            config = api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
            self._nixl = _open(api, self._name, config)
        except self._errors as error:
            tls = os.environ.get("UCX_TLS", "not set")
            raise AgentUnavailable(f"UCX can not start ({_name(error)}); UCX_TLS is {tls}") from error
        self._regions: RegionIndex | None = None
        self._registration: object = None
        self._remotes: dict[str, _Remote] = {}
        self._open: set[NixlWrite] = set()

    @property
    def name(self) -> str:
        return self._name

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        if self._regions is not None:
            raise AgentError(f"agent {self._name} has registered its memory already")
        index = RegionIndex(regions, self._name)
        rows = np.array([(one.base_address, one.size_bytes, one.device_id) for one in index.regions], np.uint64)
        try:
            self._registration = self._api.register_memory(rows, _memory(index))
        except self._errors as error:
            total = sum(region.size_bytes for region in regions)
            raise AgentError(f"NIXL refuses to register {total} bytes of {_memory(index)}: {_name(error)}") from error
        self._regions = index

    def descriptor(self) -> AgentDescriptor:
        if self._regions is None:
            raise AgentError(f"agent {self._name} has not registered any memory")
        metadata = pack_metadata(Place.here(), self._api.get_agent_metadata())
        return AgentDescriptor(BACKEND, self._name, metadata)

    def load_remote(self, remote: AgentDescriptor, regions: Sequence[RegisteredRegion]) -> None:
        if remote.backend != BACKEND:
            raise AgentError(f"agent {remote.name} speaks {remote.backend!r}, not {BACKEND!r}")
        known = self._remotes.get(remote.name)
        if known is not None and known.descriptor == remote:
            return
        if known is not None:
            self.forget_remote(remote.name)
        index = RegionIndex(regions, remote.name)
        place, metadata = unpack_metadata(remote.metadata, remote.name)
        try:
            name = self._api.add_remote_agent(metadata)
            self._api.make_connection(remote.name)
        except self._errors as error:
            self._api.remove_remote_agent(remote.name)
            raise PeerLost(f"agent {remote.name} can not be reached: {_name(error)}") from error
        if (name.decode() if isinstance(name, bytes) else name) != remote.name:
            self._api.remove_remote_agent(remote.name)
            raise AgentError(f"metadata of agent {remote.name} belongs to {name!r}")
        self._remotes[remote.name] = _Remote(remote, index, self._find_path(place, index))

    def forget_remote(self, name: str) -> None:
        if any(write.remote == name for write in self._open):
            raise AgentError(f"a write to agent {name} is open")
        if self._remotes.pop(name, None) is not None:
            self._api.remove_remote_agent(name)

    def path(self, remote: str) -> str:
        return self._known(remote).path

    def submit(self, pairs: RegionPairs, remote: str) -> NixlWrite:
        peer = self._known(remote)
        if self._regions is None or not len(pairs):
            raise AgentError(f"agent {self._name} has no memory registered, or nothing to write")
        src = _rows(pairs.src, pairs.lengths, self._regions)
        dst = _rows(pairs.dst, pairs.lengths, peer.index)
        try:
            local = self._api.get_xfer_descs(src, _memory(self._regions))
            far = self._api.get_xfer_descs(dst, _memory(peer.index))
            handle = self._api.initialize_xfer("WRITE", local, far, remote)
        except self._errors as error:
            raise AgentError(f"NIXL refuses a write of {len(pairs)} runs to {remote}: {_name(error)}") from error
        write = NixlWrite(self._name, remote, handle, WriteStatus(WriteState.IN_FLIGHT))
        self._open.add(write)
        try:
            write.status = self._status(self._api.transfer(handle), remote)
        except self._errors as error:
            if _name(error) in _NOT_POSTED:
                self._drop(write)
                raise AgentError(f"NIXL refuses to post to {remote}: {_name(error)}") from error
            write.status = self._failure(error, remote)
        return write

    def poll(self, handle: WriteHandle) -> WriteStatus:
        write = self._mine(handle)
        if write.status.state is WriteState.IN_FLIGHT:
            try:
                write.status = self._status(self._api.check_xfer_state(write.handle), write.remote)
            except self._errors as error:
                write.status = self._failure(error, write.remote)
        return write.status

    def release(self, handle: WriteHandle) -> None:
        write = self._mine(handle)
        if write.status.state is WriteState.IN_FLIGHT:
            raise AgentError(f"a write to agent {write.remote} is not over")
        self._drop(write)

    def close(self) -> None:
        if self._nixl is None:
            return
        if any(write.status.state is WriteState.IN_FLIGHT for write in self._open):
            raise AgentError(f"agent {self._name} has open writes")
        for write in tuple(self._open):
            self._drop(write)
        for name in tuple(self._remotes):
            self.forget_remote(name)
        if self._registration is not None:
            self._nixl.deregister_memory(self._registration)
        self._nixl = None

    @property
    def _api(self) -> _Nixl:
        if self._nixl is None:
            raise AgentError(f"agent {self._name} is closed")
        return self._nixl

    def _find_path(self, place: Place, index: RegionIndex) -> str:
        here = Place.here()
        on_host = place.boot == here.boot
        kinds = {index.memory_kind, MemoryKind.DRAM if self._regions is None else self._regions.memory_kind}
        device = MemoryKind.VRAM in kinds
        direct = (
            on_host
            and not device
            and place.namespace == here.namespace
            and can_read_process(place.pid, index.regions[0].base_address)
        )
        return describe_path(os.environ.get("UCX_TLS", ""), self._rdma, on_host, direct, device)

    def _status(self, state: str, remote: str) -> WriteStatus:
        if state == "DONE":
            return WriteStatus(WriteState.DONE)
        if state == "PROC":
            return WriteStatus(WriteState.IN_FLIGHT)
        raise AgentBroken(f"NIXL reports state {state!r} for a write to {remote}: it may or may not be over")

    def _failure(self, error: Exception, remote: str) -> WriteStatus:
        if _name(error) in _LOST:
            return WriteStatus(WriteState.FAILED, f"{_name(error)}: agent {remote} is gone", peer_lost=True)
        raise AgentBroken(f"NIXL raised {_name(error)} for a posted write to {remote}: it may or may not be over")

    def _drop(self, write: NixlWrite) -> None:
        handle, write.handle = write.handle, None
        self._open.discard(write)
        if handle is not None:
            self._api.release_xfer_handle(handle)

    def _known(self, remote: str) -> _Remote:
        try:
            return self._remotes[remote]
        except KeyError:
            raise AgentError(f"agent {remote!r} has not been loaded") from None

    def _mine(self, handle: WriteHandle) -> NixlWrite:
        if not isinstance(handle, NixlWrite) or handle.handle is None or handle.owner != self._name:
            raise AgentError("not an open write of this agent")
        return handle


def _rows(addresses: NDArray[np.int64], lengths: NDArray[np.int64], index: RegionIndex) -> NDArray[np.uint64]:
    """N x 3 (address, length, device), checked against the registered regions."""
    devices = index.devices(addresses, lengths)
    return np.stack((addresses, lengths, devices), axis=1).astype(np.uint64)


def _memory(index: RegionIndex) -> str:
    """NIXL's name of the kind of memory."""
    return index.memory_kind.name


def _name(error: Exception) -> str:
    return type(error).__name__
