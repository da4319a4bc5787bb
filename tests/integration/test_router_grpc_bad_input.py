"""What the gRPC front door makes of callers that send nonsense: an error for them, and nothing for anybody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from isthmus.v1 import inference_service_pb2 as pb

from router_site import Router

pytestmark = pytest.mark.integration

METHOD = "/isthmus.v1.InferenceService/Generate"
LARGEST = 100_000
GOOD = pb.InferenceServiceGenerateRequest(prompt="abc", max_tokens=4).SerializeToString()
TEXT = "cba"  # what the fake model says


@pytest.fixture
async def router() -> AsyncGenerator[Router, None]:
    async with Router(max_body_bytes=LARGEST).running() as running:
        yield running


async def ask(router: Router, raw: bytes) -> str:
    """Text of the answer to these bytes. Raises AioRpcError."""
    channel: Any = router.channel  # its stubs do not know calls of raw bytes
    call = channel.unary_stream(METHOD, response_deserializer=pb.InferenceServiceGenerateResponse.FromString)
    return "".join([part.text async for part in call(raw, timeout=20)])


@pytest.mark.parametrize(
    "raw",
    [
        b"\xff" * 40,
        GOOD[:-1],
        b"\x12\x05abc",  # a text that ends too soon
        GOOD + b"\x12\x02\xff\xfe",  # a text that is no UTF-8
        b"\x0b" * 5_000,  # groups in groups
    ],
)
async def test_bytes_that_are_no_message(router: Router, raw: bytes) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(router, raw)
    assert router.coordinator.selects == []
    assert await ask(router, GOOD) == TEXT


async def test_fields_that_this_version_does_not_know_are_passed_over(router: Router) -> None:
    assert await ask(router, GOOD + b"\xc2\xb8\x02\x03new") == TEXT


async def test_a_message_that_is_too_large(router: Router) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(router, pb.InferenceServiceGenerateRequest(prompt="x" * LARGEST).SerializeToString())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await ask(router, GOOD) == TEXT


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "sent",
    [
        [],
        [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"],
        [bytes(range(256)) * 40],
        [PREFACE],
        [PREFACE, b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\x00\x40\x00\x01\x04\x00\x00\x00\x01"],  # a head, begun
        [PREFACE, b"\xff\xff\xff\x09\xff\xff\xff\xff\xff" * 100],
    ],
)
async def test_connections_that_say_nothing_or_nonsense_disturb_nobody(router: Router, sent: Sequence[bytes]) -> None:
    sockets: list[socket.socket] = []
    loop = asyncio.get_running_loop()
    try:
        for _ in range(100):
            one = socket.socket()
            one.setblocking(False)
            sockets.append(one)
            await loop.sock_connect(one, ("127.0.0.1", router.grpc_port))
            try:
                for piece in sent:
                    await loop.sock_sendall(one, piece)
            except ConnectionError:
                pass  # hung up on, as it should
        texts = await asyncio.gather(*(ask(router, GOOD) for _ in range(10)))
        assert texts == [TEXT] * 10
    finally:
        for one in sockets:
            one.close()
