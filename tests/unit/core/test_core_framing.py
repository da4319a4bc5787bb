"""Frames over a socketpair: whole, in order, typed errors on cut streams and oversized frames."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_core.framing import MAX_FRAME, AsyncFrameSocket, FrameError, FrameSocket


@settings(max_examples=25)
@given(st.lists(st.binary(max_size=70_000), max_size=6))
def test_blocking_ends_carry_frames_in_order(frames: list[bytes]) -> None:
    left, right = (FrameSocket(end) for end in socket.socketpair())
    writer = threading.Thread(target=lambda: [left.send(frame) for frame in frames] and None)
    writer.start()
    assert [right.recv() for _ in frames] == frames
    writer.join()
    left.close()
    assert right.recv() is None
    right.close()


async def test_event_loop_end_talks_to_a_blocking_end() -> None:
    ours, theirs = socket.socketpair()
    loop_end, blocking = await AsyncFrameSocket.open(ours), FrameSocket(theirs)
    big = bytes(range(256)) * 8_000
    loop_end.send(big)
    assert await asyncio.to_thread(blocking.recv) == big
    blocking.send(b"")
    assert await loop_end.recv() == b""
    blocking.close()
    assert await loop_end.recv() is None
    loop_end.close()
    with pytest.raises(ConnectionError):
        loop_end.send(b"late")


@pytest.mark.parametrize("raw", [b"\x01", struct.pack("<I", 10) + b"abc", struct.pack("<I", MAX_FRAME + 1)])
async def test_a_cut_or_oversized_stream_is_an_error(raw: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(raw)
    ours.close()
    blocking = FrameSocket(theirs)
    with pytest.raises(FrameError):
        blocking.recv()
    blocking.close()
    ours, theirs = socket.socketpair()
    ours.sendall(raw)
    ours.close()
    loop_end = await AsyncFrameSocket.open(theirs)
    with pytest.raises(FrameError):
        await loop_end.recv()
    loop_end.close()


def test_sending_to_a_closed_end_is_a_connection_error() -> None:
    left, right = (FrameSocket(end) for end in socket.socketpair())
    right.close()
    with pytest.raises(ConnectionError):
        left.send(b"x" * 1_000_000)  # more than any socket buffer
    left.close()


async def test_frames_that_come_in_pieces_or_together_are_the_same_frames() -> None:
    ours, theirs = socket.socketpair()
    loop_end = await AsyncFrameSocket.open(theirs)
    frames = [b"first", b"", bytes(100_000), b"last"]
    stream = b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)
    ours.sendall(stream[:2])
    reading = asyncio.create_task(loop_end.recv())
    await asyncio.sleep(0.01)
    assert not reading.done()
    await asyncio.to_thread(ours.sendall, stream[2:])
    assert [await reading, *[await loop_end.recv() for _ in frames[1:]]] == frames
    ours.close()
    assert await loop_end.recv() is None
    loop_end.close()
