"""A hub with one engine: gRPC server, instance lock, local socket, the engine's command as a child."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc

from isthmus_core.config import TlsConfig
from isthmus_core.errors import StartError
from isthmus_core.ids import new_incarnation
from isthmus_core.instance_lock import InstanceLock, acquire
from isthmus_core.process import prove_port_free, split_address
from isthmus_core.rpc import RpcServer
from kvtransfer.config import OnFailure, TransferConfig
from kvtransfer.errors import KVTransferError
from kvtransfer.hub import TransferHub
from kvtransfer.local.client import HUB_VARIABLE
from kvtransfer.local.messages import LocalWelcome
from kvtransfer.local.server import LocalServer
from kvtransfer.ports import Holder, ReceiveIntent, ReceiveRequest
from kvtransfer.sidecar.peers import NamedPeers

if TYPE_CHECKING:
    from isthmus_core.tracing import Tracing
    from kvtransfer.ports import RankToHub, SchedulerToHub
    from kvtransfer.rank_info import InstanceRole

log = logging.getLogger(__name__)

_GRACE_S = 1.0
# On top of the drain time of the fabric: for the reports about dead ranks to reach the peers.
_REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """`listen`, `advertise`: host:port; `start_timeout_s`: how long the engine may take to load its model."""

    instance_id: str
    role: InstanceRole
    listen: str
    advertise: str
    transfer: TransferConfig
    tls: TlsConfig
    state_dir: Path
    start_timeout_s: float = 600.0
    stop_s: float = 30.0
    probe: bool = False
    require_path: str = ""


class Sidecar:
    """`run` starts everything, and returns the exit code of the command once all is over."""

    def __init__(self, settings: SidecarSettings, tracing: Tracing) -> None:
        self._settings, self._tracing = settings, tracing
        self._server = RpcServer(settings.tls)
        self._peers = NamedPeers(settings.transfer.max_peers)
        self._hub: TransferHub | None = None
        self._local: LocalServer | None = None
        self._given_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self, command: Sequence[str], environment: Mapping[str, str], stopping: asyncio.Event) -> int:
        """Raises StartError when it can not listen, is running already, or the command can not be started."""
        settings, incarnation = self._settings, new_incarnation()
        # The server listens when the engine is ready; a taken port must be found before a model is loaded.
        prove_port_free(*split_address(settings.listen, "--listen"), "--listen")
        lock = await acquire(settings.state_dir, settings.instance_id, incarnation)
        here = Holder(settings.advertise, settings.instance_id, incarnation)
        local = self._local = LocalServer(
            LocalWelcome(
                here,
                settings.role,
                settings.transfer.backend,
                settings.transfer.max_held_requests,
                settings.transfer.max_held_share,
                settings.transfer.on_failure is OnFailure.RECOMPUTE,
                settings.probe,
                settings.require_path,
                settings.transfer.max_peers,
            ),
            on_transfer=self._from_scheduler,
            on_rank=self._from_rank,
            on_exit=self._rank_exited,
            lock_fd=lock.fd,
        )
        try:
            environment = {**environment, HUB_VARIABLE: await local.start()}
            child = await _start(command, environment)
            try:
                return await self._serve(child, local, here, lock, stopping)
            finally:
                await self._end(child, local)
        finally:
            await local.close()
            await self._server.stop(_GRACE_S)
            lock.release()

    async def _serve(
        self,
        child: asyncio.subprocess.Process,
        local: LocalServer,
        here: Holder,
        lock: InstanceLock,
        stopping: asyncio.Event,
    ) -> int:
        ends = [asyncio.create_task(child.wait()), asyncio.create_task(stopping.wait())]
        ready = asyncio.create_task(local.ready(self._settings.start_timeout_s))
        try:
            await asyncio.wait((*ends, ready), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                try:
                    facts, infos = ready.result()
                except KVTransferError as error:
                    raise StartError(str(error)) from error
                hub = self._hub = TransferHub(
                    instance_id=here.instance_id,
                    incarnation=here.incarnation,
                    endpoint=here.endpoint,
                    role=self._settings.role,
                    model=facts.model,
                    config=self._settings.transfer,
                    rank_ports=[local.rank_port(info.rank) for info in infos],
                    deliver=local.deliver,
                    on_pair=lambda pair: log.info("pair with %s: %s", pair.instance_id, pair.state.value),
                    kill_rank=lambda _, reason: local.kill(reason),
                    stop_instance=self._give_up,
                    tracing=self._tracing,
                    tls=self._settings.tls,
                    exited_incarnations=lock.exited,
                )
                hub.start(infos)
                self._server.expose(kv_transfer_service_pb2.DESCRIPTOR)
                kv_transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server(hub.servicer, self._server.server)
                await self._server.start(self._settings.listen, "--listen")
                await self._server.set_serving(True)
                log.info("%s hands off as %s at %s", facts.engine, self._settings.role.name, here.endpoint)
                await asyncio.wait((*ends, self._given_up), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (*ends, ready):
                task.cancel()
        if self._given_up.done():
            log.error("stopping: %s", self._given_up.result())
        return child.returncode if child.returncode is not None else 0

    async def _end(self, child: asyncio.subprocess.Process, local: LocalServer) -> None:
        """The command is asked to leave, then made to; the peers are told when every rank has exited."""
        await self._server.set_serving(False)
        if child.returncode is None:
            child.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(self._settings.stop_s):
                    await child.wait()
            except TimeoutError:
                log.warning("the engine did not leave within %g s and is killed", self._settings.stop_s)
                child.kill()
                await child.wait()
        local.kill("the engine's command has ended")
        await local.wait_exited(_GRACE_S * 10)
        if self._hub is not None:
            self._hub.goodbye("the engine has ended")
            try:
                await self._hub.drain(self._settings.transfer.drain_s + _REPORT_S)
            except TimeoutError:
                log.warning("not every peer could be told that the engine has ended")
            await self._hub.close()

    def _give_up(self, reason: str) -> None:
        if not self._given_up.done():
            self._given_up.set_result(reason)

    def _from_scheduler(self, message: SchedulerToHub) -> None:
        if self._hub is None:
            raise KVTransferError("the engine hands off before it has introduced itself")
        if isinstance(message, ReceiveRequest | ReceiveIntent):
            changed = self._peers.name(message.holder)
            if changed is not None:
                self._hub.set_context_peers(changed)
        self._hub.from_scheduler(message)

    def _from_rank(self, rank: int, message: RankToHub) -> None:
        if self._hub is not None:
            self._hub.from_rank(rank, message)

    def _rank_exited(self, rank: int, reason: str) -> None:
        if self._hub is not None:
            self._hub.rank_exited(rank, reason)


async def _start(command: Sequence[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(*command, env=dict(environment), stdin=asyncio.subprocess.DEVNULL)
    except OSError as error:
        raise StartError(f"{command[0]}: {error.strerror}") from error


def environment_for(base: Mapping[str, str], backend: str) -> dict[str, str]:
    """Of the engine: the libraries of an agent look at theirs when they are loaded. Raises AgentUnavailable."""
    from kvtransfer.agents.nixl_env import has_rdma, prepare_environment

    environment = {**base, "PYTHONUNBUFFERED": "1"}
    if backend != "nixl":
        return environment
    prepare_environment(environment, has_rdma())
    return environment
