"""One side of a hand-off without I/O, for tests of the session machines: events in, the actions that came out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hub_world import NO_TRACING, blocks, key
from kv_storage import Shape, Storage, instance, rank_info
from kvtransfer.config import TransferConfig
from kvtransfer.ledger import Ledger
from kvtransfer.messages import KvRequest, ReceiveKey, TransferLimits
from kvtransfer.peer_plan import build_instance_plans
from kvtransfer.ports import (
    Holder,
    ReceiveRequest,
    RequestKey,
    SendOffer,
    TokenRange,
    TransferNotice,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceRole
from kvtransfer.session.actions import Action, ToPeer
from kvtransfer.session.holders import ReceivePeer
from kvtransfer.session.receive import ReceiveSessions
from kvtransfer.session.transmit import TransmitSessions
from kvtransfer.session.transmit_attempt import TransmitPeer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.session.actions import PeerId

K, TOKENS = key(1), TokenRange(0, 8)
DONE, NEVER, QUIESCED = WriterOutcome.DELIVERED, WriterOutcome.NEVER_STARTED, WriterOutcome.QUIESCED

# The context side: two generation instances may ask.
PEER, OTHER = ("g", b"g" * 16), ("h", b"h" * 16)
CONTEXT_CONFIG = TransferConfig("loopback", handoff_hold_s=10, drain_s=1, max_finished=4)

# The generation side: one context instance is known.
HOLDER = Holder("h:1", "c", b"c" * 16)
HOLDER_ID = (HOLDER.instance_id, HOLDER.incarnation)
GENERATION_CONFIG = TransferConfig("loopback", timeout_s=10, drain_s=1)
# Two ranks on either side, each with heads of its own: rank r writes to rank r.
TABLES = [Storage(Shape(), "slot_major", 8).page_table(rank % 2 * Shape().heads) for rank in range(4)]
CONTEXT = instance(
    *(rank_info(table, rank, tp=2) for rank, table in enumerate(TABLES[:2])), role=InstanceRole.CONTEXT, name="c"
)
GENERATION = instance(*(rank_info(table, rank, tp=2) for rank, table in enumerate(TABLES[2:])))
PLANS = build_instance_plans(CONTEXT, GENERATION)


def said(actions: list[Action], peer: PeerId | None = None) -> list[object]:
    """What was said to peers, or to one of them."""
    return [one.message for one in actions if isinstance(one, ToPeer) and peer in (None, one.peer)]


class Context:
    """Two ranks, rank r writes to rank r."""

    def __init__(self, limits: TransferLimits | None = None) -> None:
        self.out: list[Action] = []
        self.receive, self.receives = 0, dict[RequestKey, int]()
        self.sessions = TransmitSessions(CONTEXT_CONFIG, self.out.append, NO_TRACING)
        for peer in (PEER, OTHER):
            self.sessions.meet(peer, TransmitPeer(((0, 0), (1, 1)), limits or TransferLimits(8, 100)))

    def take(self) -> list[Action]:
        out, self.out[:] = list(self.out), []
        return out

    def offer(self, k: RequestKey = K, now: float = 0.0) -> None:
        self.sessions.offer(SendOffer(k, TOKENS, blocks(1, 2) + blocks(3, 4, rank=1)), now)

    def request(
        self,
        peer: PeerId = PEER,
        k: RequestKey = K,
        ranks: Sequence[int] = (0, 1),
        now: float = 1.0,
        receive: int = 0,
        retry: bool = False,
    ) -> list[Action]:
        """A new receive unless told its number."""
        destinations = tuple(one for rank in ranks for one in blocks(5, 6, rank=rank))
        if not receive:
            receive = self.receive = self.receive + 1
        if peer == PEER:
            self.receives[k] = receive
        self.sessions.request(peer, KvRequest(k, TOKENS, destinations, receive=receive, may_retry=retry), now)
        return self.take()

    def notice(
        self, rank: int, outcome: WriterOutcome = DONE, k: RequestKey = K, now: float = 2.0, reason: str = ""
    ) -> list[Action]:
        self.sessions.notice(
            rank, TransferNotice(k, rank, rank, outcome, reason=reason, receive=self.receives.get(k, 0)), now
        )
        return self.take()

    def name(self, number: int) -> ReceiveKey:
        return ReceiveKey(key(number), self.receives[key(number)])

    def writing(self) -> None:
        self.offer()
        assert len(self.request()) == 2


class Generation:
    """Two ranks; the peer is known and its stream ready unless said otherwise."""

    def __init__(
        self, ready: bool = True, limits: TransferLimits | None = None, config: TransferConfig | None = None
    ) -> None:
        self.out: list[Action] = []
        self.receives: dict[RequestKey, int] = {}
        self.ledger = Ledger.of(GENERATION.ranks)
        self.sessions = ReceiveSessions(config or GENERATION_CONFIG, self.ledger, self.out.append, NO_TRACING)
        self.terms = ReceivePeer(PLANS, limits or TransferLimits(8, 100), reconciles=True)
        self.sessions.peer_known(HOLDER_ID)
        if ready:
            self.sessions.stream_ready(HOLDER_ID, self.terms, 0.0)

    def take(self) -> list[Action]:
        out, self.out[:] = list(self.out), []
        self.ledger.check_integrity()
        for one in said(out):
            if isinstance(one, KvRequest):
                self.receives[one.key] = one.receive
        return out

    def ask(
        self, k: RequestKey = K, ids: Sequence[int] = (1, 2), now: float = 0.0, tokens: int = 8, retry: bool = False
    ):
        destinations = blocks(*ids) + blocks(*ids, rank=1)
        self.sessions.receive(ReceiveRequest(k, TokenRange(0, tokens), destinations, HOLDER, may_retry=retry), now)
        return self.take()

    def notice(
        self,
        rank: int,
        outcome: WriterOutcome = DONE,
        k: RequestKey = K,
        now: float = 1.0,
        peer: PeerId = HOLDER_ID,
        **changes: object,
    ) -> list[Action]:
        """Rank r's word about destination rank r; `changes` of fields."""
        extents = PLANS[rank].extents(TokenRange(0, 8)) if outcome is DONE else ()
        notice = TransferNotice(k, rank, rank, outcome, extents, receive=self.receives.get(k, 0))
        notice = notice._replace(**changes)  # pyright: ignore[reportArgumentType]
        self.sessions.notice(peer, notice, now)
        return self.take()
