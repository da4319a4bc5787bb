"""What clients can not do to a router: hold connections, trickle requests, leave answers unread."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from router_site import Router

pytestmark = pytest.mark.integration


@asynccontextmanager
async def connection(router: Router) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.http_port)
    try:
        yield reader, writer
    finally:
        writer.close()


def head(path: str, length: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: r\r\ncontent-length: {length}\r\n\r\n".encode()


async def answered(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and error of all that comes until the connection ends."""
    raw = await reader.read()
    status, _, body = raw.partition(b"\r\n")[0], b"", raw.partition(b"\r\n\r\n")[2]
    return int(status.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"", b"POST /v1/compl", b"GET /health HTTP/1.1\r\nx-a: b\r\n"])
async def test_a_head_that_does_not_come_is_not_waited_for(sent: bytes) -> None:
    async with Router(client_timeout_s=0.3).running() as router, connection(router) as (reader, writer):
        writer.write(sent)
        assert (await answered(reader))[0] == 408


async def test_a_head_that_trickles_is_not_waited_for() -> None:
    async with Router(client_timeout_s=0.3).running() as router, connection(router) as (reader, writer):

        async def trickle() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        assert (await answered(reader))[0] == 408
        trickling.cancel()


async def test_a_second_request_that_trickles_is_not_waited_for_either() -> None:
    async with Router(client_timeout_s=0.3).running() as router, connection(router) as (reader, writer):
        writer.write(b"GET /version HTTP/1.1\r\nhost: r\r\n\r\n")
        first = await reader.readuntil(b"\r\n\r\n")
        assert b" 200 " in first
        writer.write(b"GET /ver")
        assert b" 408 " in await reader.read()


async def test_a_body_that_does_not_come_is_a_504() -> None:
    async with Router(client_timeout_s=0.3).running() as router, connection(router) as (reader, writer):
        writer.write(head("/v1/completions", 100) + b'{"prompt"')
        status = await reader.readline()
        assert b" 504 " in status
        # The rest of the body is not waited for for ever.
        assert await reader.read()


async def test_a_refused_body_that_never_ends_is_cut_off() -> None:
    async with Router(client_timeout_s=0.3).running() as router, connection(router) as (reader, writer):
        writer.write(head("/v1/completions", 1 << 40))
        assert b" 413 " in await reader.readline()

        async def pour() -> None:
            while True:
                writer.write(b"x" * 1000)
                await asyncio.sleep(0.01)

        pouring = asyncio.create_task(pour())
        try:
            while await reader.read(1000):
                pass
        except ConnectionError:
            pass
        pouring.cancel()


async def test_connections_beyond_the_limit_are_refused_and_room_is_made_again() -> None:
    async with Router(max_connections=20).running() as router:
        idle = [await asyncio.open_connection("127.0.0.1", router.http_port) for _ in range(20)]
        await asyncio.sleep(0.1)
        async with connection(router) as (reader, _):
            status, error = await answered(reader)
        assert (status, error["code"]) == (503, "too_many_connections")
        # Those that are there go on.
        reader, writer = idle[0]
        writer.write(b"GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n")
        assert b" 200 " in await reader.read()
        for _, writer in idle:
            writer.close()
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(200):
                try:
                    if (await client.get(f"{router.url}/health")).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.02)
            else:
                raise AssertionError("the connections that ended made no room")


async def test_a_client_that_stops_reading_lets_go_of_the_workers() -> None:
    async with Router(client_timeout_s=0.5, request_timeout_s=50).running() as router:
        body = json.dumps({"prompt": ["x" * 3000] * 7, "max_tokens": 1000, "n": 16, "stream": True}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", router.http_port))
            await loop.sock_sendall(sock, head("/v1/completions", len(body)) + body)
            await router.until("r.generation.servicer.cancelled == 7")
            await router.until("len(r.coordinator.finished) == 7")


async def test_a_large_body_of_values_does_not_stop_other_streams() -> None:
    async with Router(max_body_bytes=8 << 20).running() as router:
        hostile = b'{"prompt":[' + b"1," * ((8 << 20) // 2 - 20) + b"1]}"
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            response = await client.post(f"{router.url}/v1/completions", content=hostile)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "body"
