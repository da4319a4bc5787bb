"""A cluster of local processes: proves ports, spawns, waits until it serves, restarts dead workers, stops in order.

The `isthmus up` and `isthmus demo` commands and the end-to-end tests all run clusters through this class.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import yaml

from isthmus_client.launch import ChildProcess
from isthmus_client.plan import ClusterOptions, Ports, ProcessSpec, Settings, plan_cluster
from isthmus_client.runs import Run
from isthmus_core.config import TlsConfig, parse_config
from isthmus_core.errors import StartError
from isthmus_core.process import free_port, prove_port_free
from isthmus_core.rpc import wait_serving

Report = Callable[[str], None]
# A worker that lived this long has proven itself: its next death is counted as the first.
STABLE_S = 60.0
MAX_RESTARTS = 5
MAX_BACKOFF_S = 30.0


class ChildFailed(Exception):
    """A process of the cluster ended although nobody asked it to. `code` is its exit code (negative: a signal)."""

    def __init__(self, name: str, code: int, reason: str, log: str) -> None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        super().__init__(f"{name} ended with {how}: {reason}\n(log: {log})")
        self.code = code

    @property
    def exit_code(self) -> int:
        """What the command should leave with: the child's word on settings and start, 1 for anything else."""
        return self.code if self.code in (2, 3) else 1


def choose_ports(workers: int, *, grpc: int = 0, http: int = 0, coordinator: int = 0) -> Ports:
    """Ports of a cluster; 0 = any free one. Raises StartError when a given port is taken, before anything spawns."""
    for name, port in (("--grpc-port", grpc), ("--http-port", http), ("--coordinator-port", coordinator)):
        prove_port_free("127.0.0.1", port, name)
    chosen: list[int] = []
    taken = {grpc, http, coordinator}
    while len(chosen) < workers + 3:
        if (port := free_port()) not in taken:
            taken.add(port)
            chosen.append(port)
    return Ports(coordinator or chosen[0], grpc or chosen[1], http or chosen[2], tuple(chosen[3:]))


@dataclass(slots=True)
class _Member:
    spec: ProcessSpec
    child: ChildProcess
    deaths: int = 0
    started: float = 0.0


class LocalCluster:
    """Call `start`, then `supervise` (until `stopping` is set), then `stop`; all on one event loop.

    `environment` is added to that of every process. With `restart=False` dead workers stay dead (tests).
    """

    def __init__(
        self,
        options: ClusterOptions,
        ports: Ports,
        run: Run,
        *,
        report: Report,
        environment: Mapping[str, str] | None = None,
        restart: bool = True,
    ) -> None:
        if sys.platform != "linux":
            raise StartError(
                "a local cluster needs Linux: NIXL, which moves the KV cache, has no build for this system. "
                "Use containers: docker compose -f deploy/compose.yaml up"
            )
        self.options, self.ports, self.run = options, ports, run
        self._report, self._restart = report, restart
        self._environment = dict(environment or {})
        self._members: dict[str, _Member] = {}
        for spec in plan_cluster(options, ports, run.state, os.cpu_count() or 1):
            (run.config / f"{spec.name}.yaml").write_text(_yaml(spec.settings))
            self._members[spec.name] = _Member(spec, self._child(spec, fresh=True))

    @property
    def grpc_endpoint(self) -> str:
        """host:port of the router's gRPC API."""
        return f"127.0.0.1:{self.ports.router_grpc}"

    @property
    def http_endpoint(self) -> str:
        """URL of the router's OpenAI API."""
        return f"http://127.0.0.1:{self.ports.router_http}"

    @property
    def coordinator_endpoint(self) -> str:
        """host:port of the coordinator."""
        return f"127.0.0.1:{self.ports.coordinator}"

    @property
    def specs(self) -> list[ProcessSpec]:
        """Every process, coordinator first, router last."""
        return [member.spec for member in self._members.values()]

    def process(self, name: str) -> ChildProcess:
        """The process of that name ("router", "context-0", …). Raises KeyError with the known names."""
        if name not in self._members:
            raise KeyError(f"no process {name!r}; known: {', '.join(self._members)}")
        return self._members[name].child

    def _child(self, spec: ProcessSpec, *, fresh: bool) -> ChildProcess:
        arguments = ["--config", str(self.run.config / f"{spec.name}.yaml")]
        if spec.name == "coordinator" and fresh:
            # No router of an earlier coordinator can live in a new cluster; a restarted one must wait for leases.
            arguments += ["--set", "coordinator.id_grace_s=0"]
        return ChildProcess(spec.name, spec.module, arguments, self.run.logs / f"{spec.name}.log", self._environment)

    @property
    def tls(self) -> TlsConfig:
        """Certificates of the cluster's processes, with which it can be asked."""
        return parse_config(self.specs[0].settings).tls

    async def start(self, timeout_s: float = 120.0) -> None:
        """Spawn everything and return when the router serves the model through at least one placement.

        Raises ChildFailed when a process ends, StartError when the cluster does not serve in time. Call `stop` then.
        """
        for member in self._members.values():
            await self._spawn(member)
        exits = {asyncio.create_task(member.child.wait()): member for member in self._members.values()}
        ready = asyncio.create_task(self._wait_ready(timeout_s))
        try:
            await asyncio.wait([ready, *exits], return_when=asyncio.FIRST_COMPLETED)
            # The first to fail gives the reason; the others fail because of it.
            for task, member in exits.items():
                if task.done():
                    raise self._failure(member, task.result())
            await ready
        finally:
            for task in (ready, *exits):
                task.cancel()
            await asyncio.gather(ready, *exits, return_exceptions=True)

    async def _spawn(self, member: _Member) -> None:
        member.started = time.monotonic()
        await member.child.start()

    def _failure(self, member: _Member, code: int) -> ChildFailed:
        child = member.child
        return ChildFailed(child.name, code, child.reason, str(child.log_path))

    async def _wait_ready(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        names = list(self._members)
        waits = (wait_serving(self._members[name].spec.address, timeout_s, tls=self.tls) for name in names)
        serving = await asyncio.gather(*waits)
        late = [name for name, ok in zip(names, serving, strict=True) if not ok]
        if not late and await self._http_ready(deadline):
            return
        what = ", ".join(late) or "the router's /health"
        raise StartError(f"not ready after {timeout_s:g} s: {what} (logs: {self.run.logs})")

    async def _http_ready(self, deadline: float) -> bool:
        """True as soon as GET /health answers 200; the gRPC health of the router says so a moment before."""
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            if await _http_status("127.0.0.1", self.ports.router_http, "/health") == 200:
                return True
            await asyncio.sleep(0.05)
        return False

    async def supervise(self, stopping: asyncio.Event) -> None:
        """Restart what dies, with growing pauses, until `stopping` is set. Raises ChildFailed when that is no use."""
        keepers = [asyncio.create_task(self._keep(member), name=name) for name, member in self._members.items()]
        stop = asyncio.create_task(stopping.wait())
        try:
            done, _ = await asyncio.wait([stop, *keepers], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if task is not stop:
                    await task
        finally:
            for task in (stop, *keepers):
                task.cancel()
            await asyncio.gather(stop, *keepers, return_exceptions=True)

    async def _keep(self, member: _Member) -> None:
        while True:
            failure = self._failure(member, await member.child.wait())
            lived = time.monotonic() - member.started
            member.deaths = 1 if lived > STABLE_S else member.deaths + 1
            if not self._restart or member.deaths > MAX_RESTARTS:
                raise failure
            pause = min(MAX_BACKOFF_S, 2.0 ** (member.deaths - 1))
            self._report(f"{failure}\nstarting {member.spec.name} again in {pause:g} s")
            await asyncio.sleep(pause)
            await self.restart(member.spec.name)

    async def restart(self, name: str) -> None:
        """Start a process that has ended again, with the same settings."""
        child = self.process(name)
        if child.running:
            raise RuntimeError(f"{name} (pid {child.pid}) is running")
        member = self._members[name]
        member.child = self._child(member.spec, fresh=False)
        await self._spawn(member)

    async def stop(self, grace_s: float = 15.0) -> dict[str, int]:
        """Router first, so that nothing new comes in, then workers, then the coordinator; SIGKILL after `grace_s` each.

        Returns the exit codes by name. Being cancelled kills what is left at once.
        """
        members = list(self._members.values())
        coordinator, *workers, router = members
        codes: dict[str, int] = {}
        try:
            for group in ([router], workers, [coordinator]):
                running = [member.child for member in group if member.child.running]
                ended = await asyncio.gather(*(child.stop(grace_s) for child in running))
                codes.update({child.name: code for child, code in zip(running, ended, strict=True)})
        finally:
            for member in members:
                member.child.signal_group(signal.SIGKILL)
        return codes


async def _http_status(host: str, port: int, path: str) -> int | None:
    """Status code of a GET, None when nobody answers."""
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 2.0)
    except (OSError, TimeoutError):
        return None
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        words = (await asyncio.wait_for(reader.readline(), 5.0)).split()
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else None
    except (OSError, TimeoutError):
        return None
    finally:
        writer.close()


def _yaml(settings: Settings) -> str:
    return yaml.safe_dump(settings)  # pyright: ignore[reportUnknownMemberType]
