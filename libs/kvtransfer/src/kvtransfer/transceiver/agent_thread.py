"""The thread that owns the transfer agent: commands of the hub in, events out, over one local socket.

It never runs model code and the model's thread never touches the agent. Idle, it sleeps in the kernel until the hub
says something; while writes are open it polls them with short sleeps.
"""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from isthmus_core.framing import FrameError, FrameSocket
from kvtransfer.errors import AgentError
from kvtransfer.ports import HubToRank, RankToHub
from kvtransfer.transceiver.rank import RankTransceiver
from kvtransfer.wire import rank_input_from_bytes, rank_output_to_bytes, rehearse

if TYPE_CHECKING:
    from kvtransfer.agents.base import Agent
    from kvtransfer.bounce.policy import BouncePolicy
    from kvtransfer.page_table import PageTable
    from kvtransfer.rank_info import RankInfo, Topology
    from kvtransfer.transceiver.layer_progress import LayerProgress
    from kvtransfer.transceiver.probing import ProbePolicy

log = logging.getLogger(__name__)

# Sleeps between polls of open writes: the first are short because small writes take microseconds, the longest is still
# small against a transfer that takes that long.
_FIRST_SLEEP_S = 20e-6
_LONGEST_SLEEP_S = 500e-6


class AgentThread:
    """Runs a `RankTransceiver` on a thread of its own until the hub closes the socket, `stop` is called or it fails.

    `sock`: connected stream socket, owned from here on. `make_agent` is called on the new thread.
    `on_exit(error)` is called on that thread as the last thing, with None after an orderly end. After an error nobody
    can promise any more that posted writes are over: the process must then end, so that its hub can report it.
    """

    def __init__(
        self,
        sock: socket.socket,
        make_agent: Callable[[], Agent],
        page_table: PageTable,
        rank: int,
        topology: Topology,
        *,
        on_exit: Callable[[BaseException | None], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        probing: ProbePolicy | None = None,
        bouncing: BouncePolicy | None = None,
        layers: LayerProgress | None = None,
    ) -> None:
        self._probing, self._bouncing, self._layers = probing, bouncing, layers
        self._sock, self._frames = sock, FrameSocket(sock)
        self._make_agent, self._geometry = make_agent, (page_table, rank, topology)
        self._on_exit, self._clock = on_exit, clock
        self._outbox: list[RankToHub] = []
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._info: RankInfo | None = None
        self._thread = threading.Thread(target=self._run, name="kv-agent", daemon=True)

    @property
    def failure(self) -> BaseException | None:
        """What ended the thread; None while it runs and after an orderly end."""
        return self._failure

    @property
    def is_alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def start(self, timeout_s: float = 60.0) -> RankInfo:
        """Starts and waits until the memory is registered and RankReady has been sent; returns what it said.

        Raises what stopped it (AgentUnavailable, AgentError, GeometryError), and AgentError when it takes longer.
        """
        self._thread.start()
        if not self._started.wait(timeout_s):
            raise AgentError(f"the transfer agent did not start within {timeout_s:g} s")
        if self._failure is not None:
            raise self._failure
        if self._info is None:
            raise AgentError("the transfer agent ended before it was ready: the hub closed its socket")
        return self._info

    def stop(self) -> None:
        """Asks the thread to end, as if the hub had closed the socket. Does not wait: see `join`."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            # The other side was faster; the thread sees the same end-of-file.
            log.debug("the rank socket was closed already")

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the end. True when the thread has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._serve()
        except (ConnectionError, FrameError) as error:
            log.info("the hub is gone: %s", error)
        except BaseException as error:  # noqa: BLE001  # handed to `start` or `on_exit`; nothing is swallowed
            self._failure = error
            if self._started.is_set():
                log.error("the transfer agent's thread failed: %s", error)
        finally:
            self._started.set()
            self._frames.close()
            if self._on_exit is not None:
                self._on_exit(self._failure)

    def _serve(self) -> None:
        transceiver = RankTransceiver(
            *self._geometry,
            self._make_agent(),
            self._outbox.append,
            self._clock,
            probing=self._probing,
            bouncing=self._bouncing,
            layers=self._layers,
        )
        rehearse()
        transceiver.start()
        self._flush()
        self._info = transceiver.info
        self._started.set()
        poller = select.poll()
        poller.register(self._frames.fileno(), select.POLLIN)
        busy, sleep_s = False, _FIRST_SLEEP_S
        while True:
            heard = bool(poller.poll(0 if busy else None))
            commands = self._receive() if heard else ()
            if commands is None:
                break
            try:
                for command in commands:
                    transceiver.handle(command)
                busy = transceiver.poll()
            finally:
                # What was said before a failure is still true, and the hub has to know it.
                spoke = self._flush()
            if spoke or heard or transceiver.posted:
                sleep_s = _FIRST_SLEEP_S
            elif busy:
                time.sleep(sleep_s)
                sleep_s = min(sleep_s * 2, _LONGEST_SLEEP_S)
        if transceiver.open_writes == 0:
            transceiver.close()
        else:
            # The hub is dead and nobody will order anything again; what is posted ends with this process.
            log.warning("the hub is gone with %d writes open", transceiver.open_writes)

    def _receive(self) -> tuple[HubToRank, ...] | None:
        frame = self._frames.recv()
        return None if frame is None else rank_input_from_bytes(frame)

    def _flush(self) -> bool:
        """Sends everything that was emitted as one frame. True when there was something."""
        if not self._outbox:
            return False
        self._frames.send(rank_output_to_bytes(self._outbox))
        self._outbox.clear()
        return True
