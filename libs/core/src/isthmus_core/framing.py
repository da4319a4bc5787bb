"""Length-prefixed messages over a local socket: how a hub talks to its engine process and ranks.

    +----------------+------------------+
    | u32 LE length  | length bytes     |     length <= MAX_FRAME
    +----------------+------------------+

The two ends are a socketpair made by the hub and inherited by the child: no path, no port, and when either side dies
the other reads end-of-file.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading

_HEADER = struct.Struct("<I")
# A block list of a million blocks is 4 MB; nothing legitimate comes near this.
MAX_FRAME = 64 << 20
_READ_BYTES = 1 << 18


class FrameError(Exception):
    """The stream is not made of frames, or a frame is longer than MAX_FRAME."""


def _length(header: bytes | bytearray) -> int:
    (length,) = _HEADER.unpack_from(header)
    if length > MAX_FRAME:
        raise FrameError(f"frame of {length} bytes, at most {MAX_FRAME} are allowed")
    return int(length)


class FrameSocket:
    """Blocking end: one reader thread, any number of writers. Takes ownership of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock = sock
        self._write_lock = threading.Lock()

    @classmethod
    def from_fd(cls, fd: int) -> FrameSocket:
        """The end inherited as file descriptor `fd`."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """For select and poll."""
        return self._sock.fileno()

    def recv(self) -> bytes | None:
        """Next frame; None when the other side is gone. Raises FrameError when the stream is cut inside a frame."""
        header = self._read(_HEADER.size, may_end=True)
        if header is None:
            return None
        return self._read(_length(header), may_end=False)

    def _read(self, count: int, *, may_end: bool) -> bytes | None:
        buffer = bytearray(count)
        view, got = memoryview(buffer), 0
        while got < count:
            try:
                step = self._sock.recv_into(view[got:])
            except (ConnectionResetError, OSError):
                step = 0
            if step == 0:
                if may_end and got == 0:
                    return None
                raise FrameError(f"the stream ended after {got} of {count} bytes")
            got += step
        return bytes(buffer)

    def send(self, frame: bytes) -> None:
        """Write one frame whole. Raises ConnectionError when the other side is gone."""
        try:
            with self._write_lock:
                self._sock.sendall(_HEADER.pack(len(frame)) + frame)
        except OSError as error:
            raise ConnectionError(f"the other end of the local socket is gone: {error}") from error

    def close(self) -> None:
        """Close; a reader blocked in another thread sees end-of-file."""
        with contextlib.suppress(OSError):  # already disconnected
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


class AsyncFrameSocket:
    """Event-loop end. `send` never waits: frames are buffered by the transport."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._read = bytearray()

    @classmethod
    async def open(cls, sock: socket.socket) -> AsyncFrameSocket:
        """Takes ownership of a connected socket."""
        sock.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=sock, limit=1 << 20)
        return cls(reader, writer)

    async def recv(self) -> bytes | None:
        """Next frame; None when the other side is gone. Raises FrameError when the stream is cut inside a frame."""
        while (frame := self._next()) is None:
            try:
                data = await self._reader.read(_READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                if self._read:
                    raise FrameError(f"the stream ended {len(self._read)} bytes into a frame")
                return None
            self._read += data
        return frame

    def _next(self) -> bytes | None:
        """The first frame of what was read, when it is whole: most come with one read."""
        if len(self._read) < _HEADER.size:
            return None
        end = _HEADER.size + _length(self._read)
        if len(self._read) < end:
            return None
        frame = bytes(memoryview(self._read)[_HEADER.size : end])
        del self._read[:end]
        return frame

    def send(self, frame: bytes) -> None:
        """Queue one frame. Raises ConnectionError when the other side is known to be gone."""
        if self._writer.is_closing():
            raise ConnectionError("the other end of the local socket is gone")
        self._writer.write(_HEADER.pack(len(frame)) + frame)

    def close(self) -> None:
        """Close both directions; idempotent."""
        self._writer.close()
