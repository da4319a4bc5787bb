"""NIXL over UCX. One thread owns it; with several ranks in a process every rank has its own agent.

NIXL reports failures by raising, handles are raw pointers that must never be used after their release, and releasing a
handle stops nothing. So: a handle is released only when its write is over, and set to None at that moment; what can not
be known is AgentBroken, never a guess.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvtransfer.agents import nixl_api
from kvtransfer.agents.base import (
    Operation,
    RegionIndex,
    WriteHandle,
    WriteState,
    WriteStatus,
    by_kind,
    refuse_kinds,
)
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

    from kvtransfer.agents.base import AgentCapabilities
    from kvtransfer.agents.nixl_api import Nixl
    from kvtransfer.page_table import RegisteredRegion
    from kvtransfer.regions import RegionPairs

BACKEND = "nixl"
# Raised by a post before anything has left: the write never started.
_NOT_POSTED = ("nixlInvalidParamError", "nixlNotFoundError", "nixlNotAllowedError", "nixlMismatchError")
# The endpoint is closed: everything that was on it is over.
_LOST = ("nixlRemoteDisconnectError", "nixlCancelledError")


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


class NixlAgent:
    """See `agents.base.Agent`. Raises AgentUnavailable when NIXL or UCX can not work on this machine."""

    def __init__(self, label: str) -> None:
        self._name = unique_agent_name(label)
        self._rdma = has_rdma()
        prepare_environment(os.environ, self._rdma)
        wheel = choose_wheel(loaded_torch_cuda(), installed_wheels())
        api, self._errors = nixl_api.load(wheel)
        tls = os.environ.get("UCX_TLS", "")
        try:
            nixl = nixl_api.open_agent(api, self._name)
            self._capabilities = nixl_api.probe(wheel, nixl, tls, self._rdma)
        except self._errors as error:
            raise AgentUnavailable(f"UCX can not start ({_name(error)}); UCX_TLS is {tls or 'not set'}") from error
        self._nixl: Nixl | None = nixl
        # What NIXL gave for each kind of memory of a call.
        self._calls: dict[tuple[RegisteredRegion, ...], list[object]] = {}
        self._regions: RegionIndex | None = None
        self._remotes: dict[str, _Remote] = {}
        self._open: set[NixlWrite] = set()

    @property
    def name(self) -> str:
        return self._name

    @property
    def capabilities(self) -> AgentCapabilities:
        return self._capabilities

    def register(self, regions: Sequence[RegisteredRegion]) -> None:
        refuse_kinds(regions, self._capabilities.memory_kinds, self._capabilities.engine)
        call = tuple(regions)
        if call in self._calls:
            raise AgentError(f"agent {self._name} has registered these {len(call)} regions already")
        everything = RegionIndex([one for known in (*self._calls, call) for one in known], self._name)
        made = self._calls[call] = []
        for kind, mine in by_kind(call).items():
            try:
                made.append(self._api.register_memory(_region_rows(mine), nixl_api.NAMES[kind]))
            except self._errors as error:
                self._end_registrations(call)
                total = sum(region.size_bytes for region in mine)
                raise AgentError(f"NIXL refuses to register {total} bytes of {kind.name}: {_name(error)}") from error
        self._regions = everything

    def deregister(self, regions: Sequence[RegisteredRegion]) -> None:
        call = tuple(regions)
        if call not in self._calls:
            raise AgentError(f"agent {self._name} has not registered these {len(call)} regions together")
        self._require_quiet()
        self._end_registrations(call)
        left = [one for known in self._calls for one in known]
        self._regions = RegionIndex(left, self._name) if left else None

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

    def check_remote(self, name: str, regions: Sequence[RegisteredRegion] = ()) -> bool:
        remote = self._remotes.get(name)
        if remote is None or not remote.index.covers(regions):
            return False
        try:
            return all(
                self._api.check_remote_metadata(
                    name, self._api.get_xfer_descs(_region_rows(some), nixl_api.NAMES[kind])
                )
                for kind, some in by_kind(regions or remote.index.regions).items()
            )
        except self._errors:
            return False  # raised for memory that the loaded metadata does not name

    def path(self, remote: str) -> str:
        return self._known(remote).path

    def submit(self, pairs: RegionPairs, remote: str, operation: Operation = Operation.WRITE) -> NixlWrite:
        peer = self._known(remote)
        if self._regions is None or not len(pairs):
            raise AgentError(f"agent {self._name} has no memory registered, or nothing to write")
        mine, theirs = (pairs.src, pairs.dst) if operation is Operation.WRITE else (pairs.dst, pairs.src)
        near, away = _rows(mine, pairs.lengths, self._regions), _rows(theirs, pairs.lengths, peer.index)
        try:
            local, far = (self._api.get_xfer_descs(rows, memory) for memory, rows in (near, away))
            handle = self._api.initialize_xfer(operation.name, local, far, remote)
        except self._errors as error:
            what = f"a {operation.name} of {len(pairs)} runs"
            raise AgentError(f"NIXL refuses {what} with {remote}: {_name(error)}") from error
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

    def notify(self, remote: str, message: bytes) -> None:
        self._known(remote)
        try:
            self._api.send_notif(remote, message)
        except self._errors as error:
            kind = PeerLost if _name(error) in _LOST else AgentError
            raise kind(f"agent {remote} can not be notified: {_name(error)}") from error

    def notifications(self) -> list[tuple[str, bytes]]:
        try:
            arrived = self._api.get_new_notifs()
        except self._errors as error:
            raise AgentError(f"NIXL can not say what has arrived: {_name(error)}") from error
        return [(sender, message) for sender, messages in arrived.items() for message in messages]

    def close(self) -> None:
        if self._nixl is None:
            return
        self._require_quiet()
        for write in tuple(self._open):
            self._drop(write)
        for name in tuple(self._remotes):
            self.forget_remote(name)
        for call in tuple(self._calls):
            self._end_registrations(call)
        self._nixl = None

    def _end_registrations(self, call: tuple[RegisteredRegion, ...]) -> None:
        for registration in self._calls.pop(call):
            self._api.deregister_memory(registration)

    def _require_quiet(self) -> None:
        if any(write.status.state is WriteState.IN_FLIGHT for write in self._open):
            raise AgentError(f"agent {self._name} has open writes")

    @property
    def _api(self) -> Nixl:
        if self._nixl is None:
            raise AgentError(f"agent {self._name} is closed")
        return self._nixl

    def _find_path(self, place: Place, index: RegionIndex) -> str:
        here = Place.here()
        on_host = place.boot == here.boot
        both = index.kinds if self._regions is None else index.kinds & self._regions.kinds
        # A cache in device memory and one in host memory meet in the host memory of both, if they have any.
        device = MemoryKind.VRAM in both or MemoryKind.DRAM not in both
        near = next((one for one in index.regions if one.memory_kind is MemoryKind.DRAM), index.regions[0])
        direct = (
            on_host
            and not device
            and place.namespace == here.namespace
            and can_read_process(place.pid, near.base_address)
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


def _rows(
    addresses: NDArray[np.int64], lengths: NDArray[np.int64], index: RegionIndex
) -> tuple[str, NDArray[np.uint64]]:
    """NIXL's name of the kind of memory, and N x 3 (address, length, device), checked against the registered
    regions."""
    if len(addresses) == 1:
        # What every chunk is.
        kind, device = index.device(int(addresses[0]), int(lengths[0]))
        return nixl_api.NAMES[kind], np.array(((addresses[0], lengths[0], device),), np.uint64)
    kind, devices = index.devices(addresses, lengths)
    return nixl_api.NAMES[kind], np.stack((addresses, lengths, devices), axis=1).astype(np.uint64)


def _region_rows(regions: Sequence[RegisteredRegion]) -> NDArray[np.uint64]:
    return np.array([(one.base_address, one.size_bytes, one.device_id) for one in regions], np.uint64)


def _name(error: Exception) -> str:
    return type(error).__name__
