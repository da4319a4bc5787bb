"""A router's stream to the coordinator: placements, their release, request ids, the list of served models.

What must reach the coordinator is state, not a log: the selects that wait for an answer and the placements that are
open. A broken stream releases at the coordinator everything this router held; the next stream begins by naming the
open placements again and then repeats the waiting selects, so nothing drifts, whoever was restarted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grpc
import grpc.aio
from isthmus.v1 import coordinator_service_pb2_grpc

from isthmus_core.block_keys import Keying
from isthmus_core.config import TlsConfig
from isthmus_core.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    NoCapacity,
    RequestCancelled,
    StartError,
    Unreachable,
    from_rpc_error,
    from_status_bytes,
)
from isthmus_core.ids import SnowflakeMinter
from isthmus_core.keys import RequestKey
from isthmus_core.rpc import open_channel
from isthmus_core.tasks import until_one_ends
from isthmus_router.coordinator_messages import (
    OpenPlacement,
    Placement,
    ProtocolError,
    Request,
    ServedModel,
    finish_to_pb,
    hello_to_pb,
    key_from_pb,
    lease_from_pb,
    placement_from_pb,
    prefilled_to_pb,
    select_to_pb,
    served_from_pb,
)
from isthmus_router.coordinator_stream import Call, read, write
from isthmus_router.ports import PlacementRequest

logger = logging.getLogger(__name__)

# A coordinator that is up welcomes at once; one that hangs must not hang the router.
_WELCOME_S = 5.0
_FIRST_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 2.0
# Codes that another try will not change.
_FINAL = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A select without an answer."""

    message: Request
    tokens: int
    prompt_tokens: int
    answer: asyncio.Future[Placement]


class CoordinatorClient:
    """The coordinator, seen from a router. One event loop owns it.

    `target`: host:port. `router_id`: this process, for people. `start_timeout_s`: seconds that `start` may take.
    """

    def __init__(
        self, target: str, router_id: str, tls: TlsConfig | None = None, start_timeout_s: float = 30.0
    ) -> None:
        self._target, self._router_id, self._tls = target, router_id, tls
        self._start_timeout_s = start_timeout_s
        self._minter: SnowflakeMinter | None = None
        self._served: tuple[ServedModel, ...] = ()
        self._waiting: dict[RequestKey, _Waiting] = {}
        self._open: dict[RequestKey, OpenPlacement] = {}
        # Whether the coordinator's policy looks at what is cached.
        self._wants_keys = False
        # Answers to come for selects that were given up, per key: they belong to nobody.
        self._given_up: Counter[RequestKey] = Counter()
        self._outgoing: deque[Request] = deque()
        self._to_send = asyncio.Event()
        self._welcome = asyncio.Event()
        self._refused = asyncio.Event()
        self._last_error = "no answer yet"
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> bool:
        """True while the stream to the coordinator stands."""
        return self._welcome.is_set()

    @property
    def open_placements(self) -> int:
        """Placements not finished plus selects not answered: 0 on an idle router."""
        return len(self._open) + len(self._waiting)

    def served(self) -> tuple[ServedModel, ...]:
        """Models that have a usable placement, as last heard."""
        return self._served

    def mint_id(self) -> int:
        """A new request id. Raises NoCapacity when there is no lease or it has lapsed."""
        if self._minter is None:
            raise NoCapacity(f"no lease on request ids: coordinator {self._target}: {self._last_error}")
        return self._minter.mint()

    async def start(self) -> None:
        """Connect. Raises StartError with the last reason when the coordinator has not welcomed this router after
        `start_timeout_s` seconds, or at once when it never will."""
        self._task = asyncio.create_task(self._run(), name="coordinator-client")
        waits = [
            asyncio.create_task(self._welcome.wait()),
            asyncio.create_task(self._refused.wait()),
        ]
        try:
            await asyncio.wait([*waits, self._task], timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._task.done():
            self._task.result()  # a bug: its traceback
        if self._welcome.is_set():
            return
        reason = self._last_error
        await self.close()
        if self._refused.is_set():
            raise StartError(f"coordinator {self._target} refuses this router: {reason}")
        raise StartError(
            f"coordinator {self._target} was not reached within {self._start_timeout_s:g} s "
            f"(router.start_timeout_s): {reason}"
        )

    async def close(self) -> None:
        """End the stream. Selects that wait raise RequestCancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def select(self, question: PlacementRequest, timeout_s: float) -> Placement:
        """A placement; holds load until `finish`.

        Without a stream it waits for the next one. Raises what the coordinator refused with (its code and detail),
        DuplicateRequest, Unreachable when there was no stream at the end of `timeout_s` seconds, DeadlineExceeded when
        there was one. A select that raises or is cancelled holds nothing.
        """
        if self._task is None or self._task.done():
            raise Unreachable(f"the client of coordinator {self._target} is not running")
        key = question.key
        if key in self._waiting or key in self._open:
            raise DuplicateRequest(key.request_id)
        message = select_to_pb(question, self._keyings(question))
        tokens = question.prompt_tokens + question.max_tokens
        answer: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        waiting = _Waiting(message, tokens, question.prompt_tokens, answer)
        self._waiting[key] = waiting
        self._send(message)
        try:
            async with asyncio.timeout(timeout_s):
                return await waiting.answer
        except TimeoutError:
            self._give_up(key)
            if not self.ready:
                raise Unreachable(f"coordinator {self._target} can not be reached: {self._last_error}") from None
            raise DeadlineExceeded("the choice of instances", timeout_s) from None
        except asyncio.CancelledError:
            self._give_up(key)
            raise

    def prefilled(self, key: RequestKey) -> None:
        """The prompt of a placement has been computed: that part of its load is over. Never waits."""
        held = self._open.get(key)
        if held is not None and held.prefill_tokens:
            self._open[key] = replace(held, prefill_tokens=0)
            self._send(prefilled_to_pb(key))

    def finish(self, key: RequestKey) -> None:
        """Release the load of a placement. Never waits; without effect for a key that holds none."""
        if self._open.pop(key, None) is not None:
            self._send(finish_to_pb(key))

    def _keyings(self, question: PlacementRequest) -> Sequence[Keying]:
        """How the coordinator wants to hear of the prompt's blocks."""
        if not (question.prompt and self._wants_keys):
            return ()
        return next((model.keyings for model in self._served if model.name == question.model), ())

    def _give_up(self, key: RequestKey) -> None:
        """Nobody waits for the answer any more; the coordinator releases what it may have placed."""
        if self._waiting.pop(key, None) is None:
            self.finish(key)  # the answer came while the caller was being cancelled
            return
        self._given_up[key] += 1
        self._send(finish_to_pb(key))

    def _send(self, message: Request) -> None:
        # Between streams nothing is queued: the next one starts from `_open` and `_waiting`.
        if self._welcome.is_set():
            self._outgoing.append(message)
            self._to_send.set()

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF_S
        try:
            async with open_channel(self._target, self._tls) as channel:
                stub = coordinator_service_pb2_grpc.CoordinatorServiceStub(channel)
                while True:
                    welcomed = await self._one_stream(stub)
                    backoff = _FIRST_BACKOFF_S if welcomed else min(backoff * 2, _LONGEST_BACKOFF_S)
                    # Jitter: a restarted coordinator must not meet its whole fleet in one instant.
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.0))
        finally:
            for waiting in self._waiting.values():
                if not waiting.answer.done():
                    waiting.answer.set_exception(RequestCancelled("the router is stopping"))
            self._waiting.clear()

    async def _one_stream(self, stub: coordinator_service_pb2_grpc.CoordinatorServiceStub) -> bool:
        """One try, to the end of its stream. True when it was welcomed."""
        call = stub.Route()
        welcomed = False
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that meets the end of what it waits for.
            async with asyncio.timeout(_WELCOME_S):
                await self._hello(call)
            welcomed = True
            await self._exchange(call)
        except grpc.aio.AioRpcError as error:
            self._last_error = from_rpc_error(error).message
            if error.code() in _FINAL:
                self._refused.set()
        except (TimeoutError, ProtocolError) as error:
            self._last_error = str(error) or f"no welcome within {_WELCOME_S:g} s"
        finally:
            call.cancel()
            self._welcome.clear()
            if self._minter is not None:
                self._minter.stream_broken()
        log = logger.warning if welcomed else logger.debug
        log("coordinator %s: %s", self._target, self._last_error)
        return welcomed

    async def _hello(self, call: Call) -> None:
        lease = None if self._minter is None else self._minter.presented()
        named = dict(self._open)
        try:
            await write(call, hello_to_pb(self._router_id, lease, named))
            first = await read(call)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.FAILED_PRECONDITION and lease is not None:
                self._minter = None  # the bits are somebody else's: the next try asks for new ones
            raise
        if first.WhichOneof("body") != "welcome":
            raise ProtocolError(f"it answered Hello with {first.WhichOneof('body')}")
        granted = lease_from_pb(first.welcome.lease)
        if self._minter is None or lease is None:
            self._minter = SnowflakeMinter(granted)
        elif (granted.node_id, granted.process_id) == (lease.node_id, lease.process_id):
            self._minter.stream_restored(granted)
        else:
            raise ProtocolError(f"it answered lease {lease} with {granted}")
        self._catch_up(named)

    def _catch_up(self, named: dict[RequestKey, OpenPlacement]) -> None:
        """Queue what the coordinator does not know from Hello. No await between this and the queue being in use."""
        self._given_up.clear()
        self._outgoing.clear()
        self._outgoing.extend(finish_to_pb(key) for key in named if key not in self._open)
        early = (key for key, held in named.items() if held.prefill_tokens and not self._prefill_left(key))
        self._outgoing.extend(prefilled_to_pb(key) for key in early)
        self._outgoing.extend(waiting.message for waiting in self._waiting.values())
        self._to_send.set()
        self._welcome.set()

    def _prefill_left(self, key: RequestKey) -> bool:
        held = self._open.get(key)
        return held is None or bool(held.prefill_tokens)

    async def _exchange(self, call: Call) -> None:
        """Read and write until either ends."""
        await until_one_ends(self._read_all(call), self._write_all(call))

    async def _write_all(self, call: Call) -> None:
        while True:
            await self._to_send.wait()
            self._to_send.clear()
            while self._outgoing:
                await write(call, self._outgoing.popleft())

    async def _read_all(self, call: Call) -> None:
        while True:
            message = await read(call)
            match message.WhichOneof("body"):
                case "selected":
                    self._selected(key_from_pb(message.selected.key), placement_from_pb(message.selected))
                case "select_failed":
                    failed = message.select_failed
                    waiting = self._answered(key_from_pb(failed.key))
                    if waiting is not None and not waiting.answer.done():
                        waiting.answer.set_exception(from_status_bytes(failed.status))
                case "served":
                    self._served = served_from_pb(message.served)
                    self._wants_keys = message.served.wants_prompt_keys
                case other:
                    raise ProtocolError(f"it sent {other}")

    def _selected(self, key: RequestKey, placement: Placement) -> None:
        waiting = self._answered(key)
        if waiting is None:
            return  # given up; its Finish is on the way
        prefill = waiting.prompt_tokens - placement.reuse_tokens
        self._open[key] = OpenPlacement(placement, prefill, waiting.tokens)
        if not waiting.answer.done():
            waiting.answer.set_result(placement)

    def _answered(self, key: RequestKey) -> _Waiting | None:
        """The select that an answer is for. Answers of one key come in the order of its selects."""
        if self._given_up[key] > 0:
            self._given_up[key] -= 1
            if not self._given_up[key]:
                del self._given_up[key]
            return None
        return self._waiting.pop(key, None)
