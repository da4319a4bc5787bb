"""A context and a generation engine process over real NIXL agents, the test as both hubs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine_process import EngineUnderTest, Settings
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, ContextReady, EngineLoad, EngineRequest, RequestType, Sampling
from isthmus_worker.wire.engine_frames import LegEnded, LegReleased, Stop
from kvtransfer.ports import (
    HandoffStats,
    Holder,
    LoadPeer,
    PeerLoaded,
    RankReady,
    ReceiveOutcome,
    ReceiveRequest,
    SendOffer,
    SendOutcome,
    TransferNotice,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceInfo, InstanceRole, ModelFingerprint, RankInfo

HOLDER = Holder("127.0.0.1:1", "context-0", b"c" * 16)


def first_of(leg: EngineRequest) -> list[int]:
    """First tokens of the first answer, as the context leg told them."""
    assert leg.context_phase is not None
    return list(leg.context_phase.first_tokens[0].ids)


class EnginePair:
    """Two engine processes whose ranks know each other. `other`: settings of the generation instance, when it has
    others. `ranks`: what the rank of each has said of itself, the context instance's first."""

    def __init__(self, make: Callable[..., EngineUnderTest], config: Settings, other: Settings | None = None) -> None:
        def start(role: str, own: Settings) -> EngineUnderTest:
            return make({**own, "worker": {"role": role}, "transfer": {"backend": "nixl"}}, with_rank=True)

        self.context, self.generation = start("context", config), start("generation", other or config)
        self.total_blocks = {id(self.context): self.context.ready().total_blocks}
        described = self.generation.ready()
        self.total_blocks[id(self.generation)] = described.total_blocks
        self.ranks = [self._ready(engine) for engine in (self.context, self.generation)]
        model = ModelFingerprint(described.weights_digest, described.attention_digest, described.kv_dtype)
        self.peer = InstanceInfo(
            "generation-0", b"g" * 16, "127.0.0.1:2", InstanceRole.GENERATION, model, (self.ranks[1],)
        )
        self.context.order(LoadPeer(self.peer))
        loaded = self.context.rank_event()
        assert isinstance(loaded, PeerLoaded)
        assert not loaded.incompatibilities

    @staticmethod
    def _ready(engine: EngineUnderTest) -> RankInfo:
        ready = engine.rank_event()
        assert isinstance(ready, RankReady)
        return ready.info

    def prefill(
        self, prompt: list[int], max_tokens: int, number: int = 0, **options: Any
    ) -> tuple[EngineRequest, SendOffer]:
        """The context leg; returns the generation leg and the offer."""
        key = RequestKey((1 << 40) + number)
        sampling = Sampling(max_tokens, **options)
        self.context.send(EngineRequest(key, RequestType.CONTEXT_ONLY, tuple(prompt), sampling))
        offer = self.context.next_of(SendOffer)
        self.context.next_of(LegEnded)
        done = self.context.finished(key)
        assert isinstance(done, ContextReady)
        phase = ContextPhase(key, done.first_tokens, len(prompt), HOLDER)
        return EngineRequest(key, RequestType.GENERATION_ONLY, tuple(prompt), sampling, phase), offer

    def write(self, offer: SendOffer, wanted: ReceiveRequest) -> TransferNotice:
        """One write of what is wanted, to its end."""
        assert wanted.tokens.end == offer.tokens.end
        self.context.order(
            WriteOrder(
                offer.key,
                self.peer.instance_id,
                self.peer.incarnation,
                wanted.tokens,
                offer.sources,
                wanted.destinations,
            )
        )
        notice = self.context.rank_event()
        assert isinstance(notice, TransferNotice)
        assert notice.key == offer.key
        return notice

    def hand_off(self, leg: EngineRequest, offer: SendOffer) -> TransferNotice:
        """The generation leg of a request, from its start to the release on both sides; the notice of its write."""
        self.generation.send(leg)
        wanted = self.generation.next_of(ReceiveRequest)
        assert wanted.holder == HOLDER
        notice = self.write(offer, wanted)
        assert notice.outcome is WriterOutcome.DELIVERED, notice.reason
        self.settle(leg, notice)
        return notice

    def settle(self, leg: EngineRequest, notice: TransferNotice) -> None:
        """Both sides are told how the write has ended, and the generation leg runs to its end."""
        self.generation.send(ReceiveOutcome(leg.key, settled=True, stats=HandoffStats(notice.stats, 0.5)))
        self.context.send(SendOutcome(leg.key))
        for engine in (self.generation, self.context):
            assert engine.next_of(LegReleased).key == leg.key

    def stop(self) -> None:
        """Both leave in order, holding nothing."""
        for engine in (self.context, self.generation):
            load = [event for event in engine.events if isinstance(event, EngineLoad)][-1]
            total = self.total_blocks[id(engine)]
            assert load == EngineLoad(total_blocks=total, receive_credits=total)
            engine.send(Stop())
            assert engine.outcome()[0] == 0
