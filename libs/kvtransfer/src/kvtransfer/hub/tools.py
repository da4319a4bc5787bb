"""Questions about pairs, answered beside the hand-offs: dry runs and measurements."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from isthmus.v1 import kv_transfer_service_pb2, kv_transfer_service_pb2_grpc, transfer_tools_pb2

from isthmus_core.errors import DeadlineExceeded, IsthmusError, Unreachable, from_rpc_error
from isthmus_core.rpc import open_channel
from kvtransfer.dry_run import dry_run
from kvtransfer.errors import WireError
from kvtransfer.hub.estimates import Estimates
from kvtransfer.ports import PeerLoaded, PeerProbed, ProbePeer
from kvtransfer.rank_info import InstanceRole
from kvtransfer.wire import instance_info_from_pb
from kvtransfer.wire.tools import pair_probes_to_pb, plan_to_pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_core.config import TlsConfig
    from kvtransfer.dry_run import Measured
    from kvtransfer.hub.estimates import PairEstimate
    from kvtransfer.hub.transfer_hub import TransferHub
    from kvtransfer.ports import RankToHub
    from kvtransfer.probe_ports import PairProbe
    from kvtransfer.rank_info import InstanceInfo
    from kvtransfer.session.actions import PeerId

DEFAULT_TOKENS, MOST_TOKENS = 1024, 1 << 20
INFO_TIMEOUT_S = 5.0
# Ranks measure one peer rank after the other, each with a deadline of its own.
PROBE_TIMEOUT_S = 30.0
# Bounded: a pair is asked about by people and by readiness checks, not by requests.
MOST_OPEN_PROBES = 16


class _Waiting:
    """One ProbePeer that is with the ranks."""

    def __init__(self, ranks: int) -> None:
        self.left = ranks
        self.found: list[PairProbe] = []
        self.over: asyncio.Future[list[PairProbe]] = asyncio.get_running_loop().create_future()


class HubTools:
    """Everything runs on the event loop of the hub."""

    def __init__(self, hub: TransferHub, tls: TlsConfig | None, say: Callable[[PairEstimate], None]) -> None:
        """`say` gets what hand-offs to a peer are expected to take, whenever the way to it was measured."""
        self._hub, self._tls = hub, tls
        self._estimates = Estimates(say)
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Waiting] = {}
        # The last measurement of each pair of ranks, by the peer's instance id. Instances that are gone are dropped.
        self._last: dict[str, dict[tuple[int, int], PairProbe]] = {}

    def heard(self, message: RankToHub) -> None:
        """An event of a rank."""
        match message:
            case PeerLoaded(instance_id) if message.probes:
                self._remember(instance_id, message.probes)
            case PeerProbed(number, pairs) if number in self._waiting:
                waiting = self._waiting[number]
                waiting.found += pairs
                waiting.left -= 1
                if waiting.left == 0 and not waiting.over.done():
                    waiting.over.set_result(sorted(waiting.found, key=lambda one: (one.src_rank, one.dst_rank)))
            case _:
                pass

    def tick(self) -> None:
        """To be called several times a second."""
        self._estimates.look(self._hub.instance, self._hub.core.context.terms(), self._measured)

    async def close(self) -> None:
        """Nothing is estimated any more."""
        await self._estimates.close()

    async def probe(self, request: transfer_tools_pb2.ProbeRequest) -> transfer_tools_pb2.ProbeResponse:
        """Raises IsthmusError: not the writing side, no such peer, ranks that do not answer."""
        peer = self._writable(request.instance_id)
        if len(self._waiting) >= MOST_OPEN_PROBES:
            raise IsthmusError(f"{MOST_OPEN_PROBES} probes are open", code=grpc.StatusCode.RESOURCE_EXHAUSTED)
        number, ranks = next(self._numbers), len(self._hub.instance.ranks)
        waiting = self._waiting[number] = _Waiting(ranks)
        try:
            for rank in range(ranks):
                self._hub.to_rank(rank, ProbePeer(number, *peer, request.bytes))
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                found = await waiting.over
        except TimeoutError:
            raise DeadlineExceeded(f"the probe of {peer[0]}", PROBE_TIMEOUT_S) from None
        except ConnectionError as error:
            raise Unreachable(f"a rank of this instance can not be asked: {error}") from error
        finally:
            del self._waiting[number]
        self._remember(peer[0], found)
        me = self._hub.instance.instance_id
        return transfer_tools_pb2.ProbeResponse(context_id=me, generation_id=peer[0], pairs=pair_probes_to_pb(found))

    async def plan(self, request: transfer_tools_pb2.PlanTransferRequest) -> transfer_tools_pb2.PlanTransferResponse:
        """Raises IsthmusError: no peer named, one that can not be asked, nonsense in its description."""
        tokens = request.prompt_tokens or DEFAULT_TOKENS
        if tokens > MOST_TOKENS:
            raise _invalid("prompt_tokens", f"{tokens}, at most {MOST_TOKENS} are accepted")
        peer = await self._peer(request)
        run = await asyncio.to_thread(dry_run, self._hub.instance, peer, tokens, self._measured(peer.instance_id))
        return plan_to_pb(run)

    async def _peer(self, request: transfer_tools_pb2.PlanTransferRequest) -> InstanceInfo:
        try:
            if request.HasField("instance"):
                return instance_info_from_pb(request.instance)
            if not request.endpoint:
                raise _invalid("peer", "missing: name an endpoint, or describe an instance")
            if (known := self._connected(request.endpoint)) is not None:
                return known
            async with open_channel(request.endpoint, self._tls) as channel:
                stub = kv_transfer_service_pb2_grpc.KvTransferServiceStub(channel)
                question = kv_transfer_service_pb2.GetInstanceInfoRequest()
                answer = await stub.GetInstanceInfo(question, timeout=INFO_TIMEOUT_S)
            return instance_info_from_pb(answer.instance)
        except WireError as error:
            raise IsthmusError(str(error), code=grpc.StatusCode.INVALID_ARGUMENT) from error
        except grpc.aio.AioRpcError as error:
            raise Unreachable(f"{request.endpoint} can not be asked: {from_rpc_error(error).message}") from error

    def _connected(self, endpoint: str) -> InstanceInfo | None:
        """Who lives at the endpoint, as it said itself when its stream began: right as long as the stream is."""
        core = self._hub.core
        terms = (*core.context.terms().values(), *core.generation.terms().values())
        return next((one.peer for one in terms if one.peer.endpoint == endpoint), None)

    def _writable(self, instance_id: str) -> PeerId:
        """The generation instance that is meant."""
        if self._hub.instance.role is InstanceRole.GENERATION:
            text = f"{self._hub.instance.instance_id} is a generation instance and never writes: ask its context peer"
            raise IsthmusError(text, code=grpc.StatusCode.FAILED_PRECONDITION)
        peers = [*self._hub.core.context.terms()]
        chosen = [peer for peer in peers if not instance_id or peer[0] == instance_id]
        if len(chosen) == 1:
            return chosen[0]
        names = ", ".join(sorted(peer[0] for peer in peers)) or "none"
        what = f"instance_id = {instance_id!r}: {'several have' if chosen else 'no peer of that name has'} a stream"
        raise IsthmusError(f"{what} (connected: {names})", code=grpc.StatusCode.FAILED_PRECONDITION)

    def _measured(self, instance_id: str) -> Measured:
        last = self._last.get(instance_id, {})
        return lambda src, dst: last.get((src, dst))

    def _remember(self, instance_id: str, probes: tuple[PairProbe, ...] | list[PairProbe]) -> None:
        known = {peer[0] for peer in self._hub.core.context.terms()} | {instance_id}
        self._last = {name: pairs for name, pairs in self._last.items() if name in known}
        measured = {(one.src_rank, one.dst_rank): one for one in probes if not one.problem}
        # A new dict: the old one may be read by another thread.
        self._last[instance_id] = self._last.get(instance_id, {}) | measured
        self._estimates.measured(instance_id)


def _invalid(field: str, problem: str) -> IsthmusError:
    return IsthmusError(f"{field}: {problem}", code=grpc.StatusCode.INVALID_ARGUMENT)
