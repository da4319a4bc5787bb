"""Membership at the coordinator: one stream for as long as the instance lives, opened from here or from there.

What the coordinator should know is kept here as state, not as a queue: after a broken stream everything is told again,
and a slow coordinator is told the newest load, never a backlog of old ones.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import grpc
import grpc.aio
from isthmus.v1 import coordinator_service_pb2, coordinator_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_core.errors import IsthmusError, StartError, from_rpc_error
from isthmus_core.rpc import open_channel
from isthmus_core.tasks import until_one_ends
from isthmus_worker.block_reports import BlockReports
from isthmus_worker.engine import EngineLoad, KvEvent
from isthmus_worker.member_line import DialledLine, Line, ProtocolError, Request, Response
from isthmus_worker.wire.registration import (
    ContextPeer,
    InstanceDescription,
    Order,
    PairView,
    RoleView,
    drain_from_pb,
    estimate_to_pb,
    hello_to_pb,
    pair_to_pb,
    peers_from_pb,
    role_to_pb,
    set_role_from_pb,
)
from isthmus_worker.wire.responses import load_to_pb
from kvtransfer.hub.estimates import PairEstimate
from kvtransfer.rank_info import InstanceRole

logger = logging.getLogger(__name__)

# A load is told at most this often.
LOAD_INTERVAL_S = 0.2
# Estimates that are kept, and told again after a reconnect; the oldest ones may be of instances that are gone.
_MOST_ESTIMATES = 1024
# The first answer of a coordinator that is up comes at once; one that hangs must not hang the worker.
_WELCOME_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
# Codes that another try will not change.
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


class AlreadyEnlisted(IsthmusError):
    """Another coordinator, or an earlier stream of the same one, has this instance."""

    code = grpc.StatusCode.ALREADY_EXISTS

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"instance {instance_id} is a member of a cluster: list it at one coordinator only")


class Registration:
    """The membership of one instance. One event loop owns it.

    `coordinator`: host:port; None when a coordinator has this instance in its list and comes to it (`enlisted`).
    `on_peers` gets the complete list of context instances whenever it changes; `on_member(True/False)` whenever the
    membership begins or is lost. `refused` completes with the reason when the coordinator will not have this instance
    (any more): another incarnation has taken its name, or it is misconfigured. Nothing is tried after that.
    """

    def __init__(
        self,
        coordinator: str | None,
        description: InstanceDescription,
        *,
        tls: TlsConfig | None = None,
        on_peers: Callable[[Sequence[ContextPeer]], None] | None = None,
        on_member: Callable[[bool], None] | None = None,
        on_order: Callable[[Order], None] | None = None,
        kv_events: Callable[[], AsyncIterator[KvEvent]] | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._description = description
        self._tls = tls
        self._on_peers, self._on_member, self._on_order = on_peers, on_member, on_order
        self._kv_events = kv_events
        self._writing = asyncio.Lock()
        self._role: RoleView | None = None
        self._role_untold = False
        self._load = EngineLoad()
        self._pairs: dict[str, PairView] = {}
        self._draining = False
        self._untold_pairs: dict[str, PairView] = {}
        self._estimates: dict[str, PairEstimate] = {}
        self._untold_estimates: dict[str, PairEstimate] = {}
        self._takes_estimates = False
        self._peers: tuple[ContextPeer, ...] = ()
        self._changed = asyncio.Event()
        self._member = asyncio.Event()
        self._last_error = "no answer yet"
        self.refused: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        # A coordinator that came is being talked to.
        self._talking = False
        self._leave = asyncio.Event()

    @property
    def is_member(self) -> bool:
        """True while the coordinator knows this instance."""
        return self._member.is_set()

    def set_load(self, load: EngineLoad) -> None:
        """The newest load; told when it differs from what was told, at most a few times a second."""
        self._load = load
        self._changed.set()

    def set_pair(self, pair: PairView) -> None:
        """State of the stream to one context instance; told at once."""
        self._pairs[pair.instance_id] = self._untold_pairs[pair.instance_id] = pair
        self._changed.set()

    def set_estimate(self, estimate: PairEstimate) -> None:
        """What hand-offs to a generation instance are expected to take; told at once, to coordinators that take it."""
        name = estimate.instance_id
        self._estimates.pop(name, None)
        self._estimates[name] = estimate
        if len(self._estimates) > _MOST_ESTIMATES:
            del self._estimates[next(iter(self._estimates))]
        if self._takes_estimates:
            self._untold_estimates[name] = estimate
            self._changed.set()

    def set_role(self, role: RoleView) -> None:
        """How far a change of role is; told at once, and again after every reconnect."""
        self._role, self._role_untold = role, True
        if role.role is not InstanceRole.GENERATION:
            self._pairs.clear()
            self._untold_pairs.clear()
        if role.role is not InstanceRole.CONTEXT:
            self._estimates.clear()
            self._untold_estimates.clear()
        self._changed.set()

    def set_draining(self) -> None:
        """No new work please."""
        self._draining = True
        self._changed.set()

    async def start(self, timeout_s: float) -> None:
        """Register. Raises StartError with the last reason when the coordinator is not reached within `timeout_s`
        seconds, or at once when it refuses this instance for good. One that is listed waits to be asked: at once."""
        if self._coordinator is None:
            return
        self._task = asyncio.create_task(self._run(self._coordinator))
        member = asyncio.create_task(self._member.wait())
        waits = [member, self.refused, self._task]
        try:
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            member.cancel()
        if self.refused.done():
            raise StartError(f"coordinator {self._coordinator} refuses this instance: {self.refused.result()}")
        if self._task.done():
            self._task.result()  # a bug: its traceback
        if not self._member.is_set():
            raise StartError(
                f"coordinator {self._coordinator} was not reached within {timeout_s:g} s (worker.start_timeout_s): "
                f"{self._last_error}"
            )

    async def close(self) -> None:
        """Leave the cluster."""
        self._leave.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def enlisted(self, line: Line) -> None:
        """A coordinator has come: a member of its cluster until it goes. Raises AlreadyEnlisted."""
        if self._talking:
            raise AlreadyEnlisted(self._description.instance_id)
        self._talking = True
        try:
            await until_one_ends(self._talk(line), self._leaving())
        except (TimeoutError, ProtocolError) as error:
            logger.warning("the coordinator is gone: %s", str(error) or f"no welcome within {_WELCOME_S:g} s")
        finally:
            self._talking = False
            self._set_member(False)

    async def _leaving(self) -> None:
        await self._leave.wait()

    async def _run(self, coordinator: str) -> None:
        backoff = _FIRST_BACKOFF_S
        async with open_channel(coordinator, self._tls) as channel:
            stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
            while True:
                was_member = await self._one_stream(stub)
                if self.refused.done():
                    return
                backoff = _FIRST_BACKOFF_S if was_member else min(backoff * 2, _LONGEST_BACKOFF_S)
                # Jitter: a restarted coordinator must not meet its whole fleet in one instant.
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _one_stream(self, stub: coordinator_service_pb2_grpc.CoordinatorServiceStub) -> bool:
        """One try, to the end of its stream. True when this instance was a member during it."""
        call = stub.Register()
        try:
            await self._talk(DialledLine(call))
        except grpc.aio.AioRpcError as error:
            reason = from_rpc_error(error)
            self._last_error = reason.message
            if error.code() in _FINAL:
                self.refused.set_result(reason.message)
        except (TimeoutError, ProtocolError) as error:
            self._last_error = str(error) or f"no welcome within {_WELCOME_S:g} s"
        finally:
            call.cancel()
            was_member = self.is_member
            self._set_member(False)
        log = logger.warning if was_member else logger.debug
        log("coordinator %s: %s", self._coordinator, self._last_error)
        return was_member

    def _set_member(self, member: bool) -> None:
        if member == self._member.is_set():
            return
        if member:
            self._member.set()
        else:
            self._member.clear()
        if self._on_member is not None:
            self._on_member(member)

    async def _talk(self, line: Line) -> None:
        """Say Hello, then read and write until the stream ends, which raises."""
        # Not wait_for: before Python 3.12 it loses a cancel that meets the completion.
        async with asyncio.timeout(_WELCOME_S):
            role = self._description.role if self._role is None else self._role.role
            await self._write(line, hello_to_pb(replace(self._description, role=role)))
            first = await line.read()
        if first.WhichOneof("body") != "welcome":
            raise ProtocolError(f"it answered Hello with {first.WhichOneof('body')}")
        self._set_member(True)
        self._untold_pairs = dict(self._pairs)
        self._role_untold = self._role is not None
        self._untold_estimates = dict(self._estimates) if first.welcome.takes_estimates else {}
        self._takes_estimates = first.welcome.takes_estimates
        blocks = BlockReports(self._kv_events, lambda message: self._write(line, message))
        await until_one_ends(self._read(line, blocks), self._tell(line), blocks.run())

    async def _read(self, line: Line, blocks: BlockReports) -> None:
        while True:
            message = await line.read()
            try:
                self._hear(message, blocks)
            except ValueError as error:
                raise ProtocolError(f"{message.WhichOneof('body')}: {error}") from error

    def _hear(self, message: Response, blocks: BlockReports) -> None:
        match message.WhichOneof("body"):
            case "peers":
                self._hear_peers(peers_from_pb(message.peers, self._peers))
            case "send_kv_snapshot":
                blocks.ask()
            case "drain":
                self._order(drain_from_pb(message.drain))
            case "set_role":
                self._order(set_role_from_pb(message.set_role))
            case other:
                raise ProtocolError(f"it sent {other} to a member")

    def _hear_peers(self, peers: Sequence[ContextPeer]) -> None:
        self._peers = tuple(peers)
        known = {peer.instance_id for peer in peers}
        self._pairs = {name: pair for name, pair in self._pairs.items() if name in known}
        if self._on_peers is not None:
            self._on_peers(peers)

    def _order(self, order: Order) -> None:
        if self._on_order is not None:
            self._on_order(order)

    async def _write(self, line: Line, message: Request) -> None:
        async with self._writing:  # a stream takes one message at a time
            await line.write(message)

    async def _tell(self, line: Line) -> None:
        told_load: EngineLoad | None = None
        told_draining = False
        load_allowed_at = 0.0
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            if self._draining and not told_draining:
                told_draining = True
                await self._write(line, Request(draining=coordinator_service_pb2.Draining()))
            if self._role is not None and self._role_untold:
                self._role_untold = False
                await self._write(line, role_to_pb(self._role))
            while self._untold_pairs:
                _, pair = self._untold_pairs.popitem()
                await self._write(line, Request(pair=pair_to_pb(pair)))
            while self._untold_estimates:
                _, estimate = self._untold_estimates.popitem()
                await self._write(line, estimate_to_pb(estimate))
            wait_s = None
            if self._load != told_load:
                wait_s = load_allowed_at - loop.time()
                if wait_s <= 0:
                    wait_s, told_load = None, self._load
                    load_allowed_at = loop.time() + LOAD_INTERVAL_S
                    await self._write(line, Request(load=load_to_pb(told_load)))
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
