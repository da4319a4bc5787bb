"""A real engine process, and a test in the place of its hub."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from isthmus_core.errors import IsthmusError
from isthmus_core.framing import FrameSocket
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextReady, EngineDescription, EngineRequest, Finished, Tokens
from isthmus_worker.wire.engine_frames import (
    EngineCommand,
    EngineEvent,
    LegEnded,
    LegReleased,
    LegTokens,
    commands_to_bytes,
    events_from_bytes,
)
from kvtransfer.ports import HubToRank, RankToHub
from kvtransfer.wire import rank_input_to_bytes, rank_output_from_bytes

Event = TypeVar("Event")
Settings = Mapping[str, Mapping[str, Any]]
MOCK: Settings = {
    "engine": {"kind": "mock", "num_blocks": 256, "mock": {}},
    "model": {"name": "mock", "tokenizer": "byte"},
    "logging": {"level": "WARNING"},
}


def settings(**sections: Mapping[str, Any]) -> Settings:
    """The mock's settings, changed."""
    return {name: {**MOCK.get(name, {}), **sections.get(name, {})} for name in {*MOCK, *sections}}


class EngineUnderTest:
    """The hub's ends of the sockets of one engine process. `events` is everything it has said, in order."""

    def __init__(
        self,
        config: Settings = MOCK,
        *,
        with_rank: bool = False,
        lock_fd: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        rank_ours, rank_theirs = socket.socketpair()
        with theirs, rank_theirs, tempfile.TemporaryFile() as file:
            file.write(json.dumps(config).encode())
            file.seek(0)
            command = [sys.executable, "-m", "isthmus_worker.engine_process", "--config", f"/dev/fd/{file.fileno()}"]
            command += ["--scheduler-fd", str(theirs.fileno())]
            inherited = [file.fileno(), theirs.fileno()]
            if with_rank:
                command += ["--rank-fd", str(rank_theirs.fileno())]
                inherited.append(rank_theirs.fileno())
            if lock_fd is not None:
                command += ["--lock-fd", str(lock_fd)]
                inherited.append(lock_fd)
            self.process = subprocess.Popen(
                [*command, *arguments],
                pass_fds=inherited,
                env={**os.environ, "UCX_MODULES": "^ib", "OMP_NUM_THREADS": "1"},
                stderr=subprocess.PIPE,
                text=True,
            )
        self.frames, self.rank = FrameSocket(ours), FrameSocket(rank_ours)
        self.events: list[EngineEvent] = []
        self._read = 0
        self._said: str | None = None
        self._rank_events: list[RankToHub] = []

    # --- scheduler socket

    def send(self, *commands: EngineCommand) -> None:
        """One frame of commands."""
        self.frames.send(commands_to_bytes(commands))

    def next(self) -> EngineEvent:
        """The next event. EOFError when the process is gone."""
        while self._read == len(self.events):
            frame = self.frames.recv()
            if frame is None:
                raise EOFError(self._errors())
            self.events += events_from_bytes(frame)
        self._read += 1
        return self.events[self._read - 1]

    def next_of(self, kind: type[Event]) -> Event:
        """The next event of a kind; what comes before it stays in `events` only."""
        while not isinstance(event := self.next(), kind):
            pass
        return event

    def ready(self) -> EngineDescription:
        """Waits for the first event."""
        event = self.next()
        assert isinstance(event, EngineDescription), event
        return event

    def run(self, *requests: EngineRequest) -> dict[RequestKey, list[int]]:
        """Submits requests, waits until all are released and returns their tokens."""
        self.send(*requests)
        left = {request.key for request in requests}
        while left:
            left.discard(self.next_of(LegReleased).key)
        return {request.key: self.tokens(request.key) for request in requests}

    def tokens(self, key: RequestKey) -> list[int]:
        """All tokens of a request so far."""
        return [token for chunk in self._said_of(key) for token in chunk.ids]

    def chunks(self, key: RequestKey, sample: int = 0) -> list[Tokens]:
        """What one answer of a request has said."""
        return [chunk for chunk in self._said_of(key) if chunk.sample == sample]

    def _said_of(self, key: RequestKey) -> list[Tokens]:
        said = [one.said for one in self.events if isinstance(one, LegTokens) and one.key == key]
        return [one for one in said if isinstance(one, Tokens)]

    def last_tokens(self, key: RequestKey) -> Tokens:
        """The last chunk of a request's first answer."""
        return self.chunks(key)[-1]

    def end(self, key: RequestKey) -> LegEnded:
        """The end of a request; there must be exactly one."""
        (end,) = (one for one in self.events if isinstance(one, LegEnded) and one.key == key)
        return end

    def failure(self, key: RequestKey) -> IsthmusError | None:
        """What a request failed with."""
        end = self.end(key).end
        return end if isinstance(end, IsthmusError) else None

    def finished(self, key: RequestKey) -> Finished | ContextReady:
        """The good end of a request."""
        end = self.end(key)
        assert not isinstance(end.end, IsthmusError), end.end
        return end.end

    # --- rank socket

    def order(self, *commands: HubToRank) -> None:
        """One frame of commands to the rank role."""
        self.rank.send(rank_input_to_bytes(commands))

    def rank_event(self) -> RankToHub:
        """The next event of the rank role. EOFError when the process is gone."""
        while not self._rank_events:
            frame = self.rank.recv()
            if frame is None:
                raise EOFError(self._errors())
            self._rank_events += rank_output_from_bytes(frame)
        return self._rank_events.pop(0)

    # --- the end

    def leave(self) -> None:
        """Closes the hub's ends, as the kernel does when a hub dies."""
        self.frames.close()
        self.rank.close()

    def outcome(self) -> tuple[int, str]:
        """Waits for the exit: code and last line on stderr."""
        errors = self._errors()
        lines = [line for line in errors.splitlines() if line.strip()]
        return self.process.returncode, lines[-1] if lines else ""

    def _errors(self) -> str:
        """Waits for the end; everything on stderr."""
        if self._said is None:
            self._said = self.process.communicate()[1]
        return self._said

    def close(self) -> None:
        """Leaves no process behind."""
        self.leave()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self._errors()


@contextmanager
def engines() -> Generator[Callable[..., EngineUnderTest]]:
    """A factory of `EngineUnderTest`; all of them are gone at the end."""
    with ExitStack() as stack:

        def make(config: Settings = MOCK, **options: Any) -> EngineUnderTest:
            engine = EngineUnderTest(config, **options)
            stack.callback(engine.close)
            return engine

        yield make
