"""The hub's socket for engines that start their own processes: who is let in, who is there, who has died."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvtransfer.errors import KVTransferError, WireError
from kvtransfer.local.client import HubUnreachable, connect
from kvtransfer.local.messages import LocalHello, LocalWelcome
from kvtransfer.local.server import LocalServer
from kvtransfer.ports import Holder
from kvtransfer.rank_info import InstanceRole
from kvtransfer.sidecar.peers import NamedPeers
from kvtransfer.wire.local import local_welcome_from_bytes, local_welcome_to_bytes
from local_engine import FACTS, RANKS

pytestmark = pytest.mark.integration

CHILDREN: list[asyncio.subprocess.Process] = []
SUPPORT = Path(__file__).parents[1] / "support"
WELCOME = LocalWelcome(
    Holder("127.0.0.1:1", "g-0", b"g" * 16), InstanceRole.GENERATION, "loopback", recompute=False, max_peers=5
)


@asynccontextmanager
async def listening(lock_fd: int | None = None) -> AsyncGenerator[tuple[LocalServer, str, list[tuple[int, str]]]]:
    exits: list[tuple[int, str]] = []
    server = LocalServer(
        WELCOME,
        on_transfer=lambda _: None,
        on_rank=lambda *_: None,
        on_exit=lambda *exit_: exits.append(exit_),
        lock_fd=lock_fd,
    )
    path = await server.start()
    try:
        yield server, path, exits
    finally:
        if os.getpid() not in server.processes:  # where the test itself is the engine
            server.kill("the test is over")
            await server.wait_exited(10)
        await server.close()
        while CHILDREN:
            child = CHILDREN.pop()
            if child.returncode is None:
                child.kill()
            await child.communicate()


async def what_is_missing(server: LocalServer) -> str:
    """Why the engine is not ready, as far as has been heard."""
    with pytest.raises(KVTransferError) as caught:
        await server.ready(0.2)
    return str(caught.value)


async def process(path: str, what: str) -> asyncio.subprocess.Process:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, str(SUPPORT / "local_engine.py"), path, what), stdout=asyncio.subprocess.PIPE
    )
    CHILDREN.append(started)
    assert started.stdout is not None
    assert await started.stdout.readline() == b"ready\n"
    return started


async def test_an_engine_is_ready_when_all_its_processes_are_there():
    async with listening() as (server, path, exits):
        ranks = await process(path, "ranks")
        # "ready" says that the ranks have spoken, not that they have been heard: the bound is the test's own timeout.
        while "of 2 ranks [0, 1]" not in (missing := await what_is_missing(server)):
            pass
        assert "scheduler is missing" in missing
        await process(path, "scheduler")
        facts, infos = await server.ready(10)
        assert facts == FACTS
        assert [info.rank for info in infos] == list(range(RANKS))
        os.kill(ranks.pid, signal.SIGKILL)
        reason = await asyncio.wait_for(server.lost, 10)
        assert str(ranks.pid) in reason
        assert sorted(rank for rank, _ in exits) == list(range(RANKS))
        with pytest.raises(KVTransferError, match="has exited"):
            await server.ready(1)


async def test_a_process_leaves_with_its_hub():
    async with listening() as (server, path, _):
        scheduler = await process(path, "scheduler")
        await server.close()
        assert await asyncio.wait_for(scheduler.wait(), 10) == 4


async def test_the_lock_of_the_instance_is_handed_to_every_process(tmp_path: Path):
    lock = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    async with listening(lock) as (_, path, _):
        connection = await asyncio.to_thread(connect, path, LocalHello(RANKS, 0))
        assert connection.welcome == WELCOME
        assert connection.lock_fd is not None
        assert os.fstat(connection.lock_fd).st_ino == os.fstat(lock).st_ino
        assert not os.get_inheritable(connection.lock_fd)
        connection.sock.close()
        os.close(connection.lock_fd)
    os.close(lock)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [(LocalHello(RANKS, 0), "rank 0 is here already"), (LocalHello(3, 1), "3 ranks, other processes said 2")],
)
async def test_who_does_not_fit_is_told_why(hello, reason):
    async with listening() as (_, path, _):
        first = await asyncio.to_thread(connect, path, LocalHello(RANKS, 0))
        with pytest.raises(HubUnreachable, match=reason):
            await asyncio.to_thread(connect, path, hello)
        first.sock.close()


async def test_another_release_is_told_why(monkeypatch):
    async with listening() as (_, path, _):
        monkeypatch.setattr("kvtransfer.wire.local.LOCAL_VERSION", 2)
        data = __import__("kvtransfer.wire.local", fromlist=["x"]).local_hello_to_bytes(LocalHello(RANKS, 0))
        monkeypatch.undo()
        monkeypatch.setattr("kvtransfer.local.client.local_hello_to_bytes", lambda _: data)
        with pytest.raises(HubUnreachable, match="this hub speaks 1"):
            await asyncio.to_thread(connect, path, LocalHello(RANKS, 0))


def test_a_hub_of_a_release_without_chunks_is_refused():
    data = local_welcome_to_bytes(replace(WELCOME, max_peers=0))
    with pytest.raises(WireError, match=r"local_welcome\.max_peers"):
        local_welcome_from_bytes(data)


async def test_nobody_listens(tmp_path: Path):
    with pytest.raises(HubUnreachable, match="is it running"):
        await asyncio.to_thread(connect, str(tmp_path / "none.sock"), LocalHello(1, 0))


async def test_a_stranger_who_says_nothing_harms_nobody():
    async with listening() as (_, path, _):
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(path)
            connection = await asyncio.to_thread(connect, path, LocalHello(RANKS, 0))
            assert connection.welcome == WELCOME
            connection.sock.close()


def test_peers_are_those_that_requests_name():
    peers = NamedPeers(2)
    holders = [Holder(f"h:{n}", f"c-{n}", bytes([n]) * 16) for n in range(3)]
    first = peers.name(holders[0])
    assert first is not None
    assert [one.instance_id for one in first] == ["c-0"]
    assert peers.name(holders[0]) is None
    peers.name(holders[1])
    peers.name(holders[0])
    last = peers.name(holders[2])
    assert last is not None
    assert {one.instance_id for one in last} == {"c-0", "c-2"}
    again = peers.name(Holder("h:9", "c-2", b"n" * 16))
    assert again is not None
    assert [one.endpoint for one in again if one.instance_id == "c-2"] == ["h:9"]
