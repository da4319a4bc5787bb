"""The prefill's side of the connector: what is offered when, and which blocks stay until it is over.

    context first      the prompt is complete ──(packed)──▶ offer
    both at once       scheduled ──▶ bind; every step ──(computed, packed)──▶ chunk; complete ──▶ last chunk

What a step computes is offered when every worker has said that it has run. Blocks of chunks are pinned: vLLM may
preempt a prompt that is not complete, and would give them to somebody else while they are still being read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from kvtransfer.errors import KVTransferError
from kvtransfer.integrations.vllm.block_lists import BlockLists, Blocks
from kvtransfer.ports import RankBlocks, TokenRange, TransferFailure

if TYPE_CHECKING:
    from kvtransfer.integrations.vllm.params import PrefillLeg
    from kvtransfer.ports import RequestKey, SendOutcome
    from kvtransfer.transceiver.scheduler import SchedulerTransceiver

log = logging.getLogger(__name__)

# vLLM's id of a request, and a number among what it offers.
Part = tuple[str, int]


class End(Enum):
    """How a prefill has ended: somebody goes on from its first token, the token ends the answer, or nobody wants it."""

    GOES_ON = auto()
    STOPPED = auto()
    DROPPED = auto()


class BlockPins(Protocol):
    """vLLM's reference counts of blocks."""

    def pin(self, blocks: Sequence[int]) -> None: ...

    def unpin(self, blocks: Sequence[int]) -> None: ...


class Prompt(Protocol):
    """The part of vLLM's Request that is used."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int


@dataclass(slots=True)
class _Pending:
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]
    is_last: bool
    waits_for: int


@dataclass(slots=True, eq=False)
class _Offer:
    """`kept`: vLLM keeps the blocks of the request until it is told. `cut`: tokens that are in chunks, said or not."""

    leg: PrefillLeg
    request: Prompt
    kept: bool = False
    over: bool = False
    cut: int = 0
    parts: int = 0
    pinned: list[int] = field(default_factory=list[int])
    # In order: a chunk is said after the one before.
    pending: dict[int, _Pending] = field(default_factory=dict[int, _Pending])


class Offers:
    """Of one engine. `workers`: how many say when they have run a step; `packs`: they keep a plain copy of their cache,
    and only what is in it can be offered."""

    def __init__(self, transceiver: SchedulerTransceiver, *, workers: int, packs: bool) -> None:
        self._transceiver, self._workers, self._packs = transceiver, workers, packs
        self._open: dict[RequestKey, _Offer] = {}
        self._of_request: dict[str, _Offer] = {}
        self.lists = BlockLists()
        self.pins: BlockPins | None = None
        # What workers pack, or only answer for, in the next step; blocks by vLLM's groups.
        self.pack: dict[Part, Blocks] = {}

    @property
    def is_idle(self) -> bool:
        """True when nothing is offered or about to be."""
        return not (self._open or self.pack)

    def scheduled(self, leg: PrefillLeg, request: Prompt) -> None:
        """The prompt begins to be computed, or does so again. Where the other leg waits it may ask from now on."""
        if not leg.waits or leg.key in self._open:
            return
        try:
            self._transceiver.bind_context(leg.key)
        except KVTransferError as error:
            log.error("request %s can not be handed off: %s", request.request_id, error)
            return
        self._open[leg.key] = self._of_request[request.request_id] = _Offer(leg, request)

    def step(
        self, scheduled: Mapping[str, int], block_ids: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> dict[Part, Blocks]:
        """What the workers of the step that has been made pack. `scheduled`: tokens of each request in it."""
        size = self.lists.chunk_tokens
        if size and self.pins is not None:
            for request_id, offer in self._of_request.items():
                if request_id in scheduled and not offer.over and not offer.kept:
                    self._cut(offer, offer.request.num_computed_tokens + scheduled[request_id], size, block_ids)
        pack, self.pack = self.pack, {}
        return pack

    def _cut(
        self, offer: _Offer, computed: int, size: int, block_ids: Callable[[str], Sequence[Sequence[int]] | None]
    ) -> None:
        end = computed // size * size
        # The last chunk is what is left when the first token is known.
        if end <= offer.cut or computed >= offer.request.num_prompt_tokens or self.pins is None:
            return
        blocks = block_ids(offer.request.request_id)
        if blocks is None:
            return
        held = self.lists.whole(blocks, offer.cut, end)
        for ids in held:
            self.pins.pin(ids)
            offer.pinned += ids
        self._later(offer, blocks, end, is_last=False)

    def _later(self, offer: _Offer, blocks: Sequence[Sequence[int]], end: int, *, is_last: bool) -> None:
        """Offered when every worker has run the next step."""
        sources = self.lists.of_range(blocks, 0, end)
        number, offer.parts = offer.parts, offer.parts + 1
        offer.pending[number] = _Pending(TokenRange(offer.cut, end), sources, is_last, self._workers)
        self.pack[offer.request.request_id, number] = self.lists.whole(blocks, offer.cut, end)
        offer.cut = end

    def finished(self, leg: PrefillLeg, request: Prompt, blocks: Sequence[Sequence[int]], end: End) -> int:
        """The request is over. Returns the tokens that are offered; whether its blocks stay: `keeps`."""
        offer = self._of_request.get(request.request_id)
        if offer is None and leg.key in self._open:
            return 0  # answers to one prompt share its cache: another one has offered it
        # Of several answers another one may go on.
        if end is End.GOES_ON or (end is End.STOPPED and offer is not None and leg.waits > 1):
            return self._complete(offer, leg, request, blocks)
        if end is End.DROPPED and offer is not None and not offer.over:
            self._transceiver.cancel_request(leg.key)
        return 0  # of one that stopped the other leg is told before it is withdrawn, by the worker

    def _complete(self, offer: _Offer | None, leg: PrefillLeg, request: Prompt, blocks: Sequence[Sequence[int]]) -> int:
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        try:
            if offer is None:
                offer = self._offer_whole(leg, request, tokens, blocks)
            elif not offer.over:
                self._later(offer, blocks, tokens, is_last=True)
        except KVTransferError as error:
            log.error("request %s can not be handed off: %s", request.request_id, error)
            return 0
        return 0 if offer.over else tokens

    def _offer_whole(self, leg: PrefillLeg, request: Prompt, tokens: int, blocks: Sequence[Sequence[int]]) -> _Offer:
        offer = _Offer(leg, request)
        if self._packs:
            # Its number must be known before anybody can ask; the blocks follow when the workers have packed.
            self._transceiver.bind_context(leg.key)
            self._later(offer, blocks, tokens, is_last=True)
        else:
            sources = self.lists.of_range(blocks, 0, tokens)
            self._transceiver.respond_and_send_async(leg.key, TokenRange(0, tokens), sources)
        self._open[leg.key] = self._of_request[request.request_id] = offer
        return offer

    def keeps(self, request_id: str) -> bool:
        """True when vLLM has to keep the blocks of a request that is over until `ended` names it."""
        offer = self._of_request.get(request_id)
        if offer is None:
            return False
        if offer.over:
            del self._of_request[request_id]
            return False
        offer.kept = True
        return True

    def packed(self, counts: Mapping[Part, int]) -> None:
        """So many workers have run the step after which these parts can be read."""
        for (request_id, number), count in counts.items():
            offer = self._of_request.get(request_id)
            if offer is None or number not in offer.pending:
                continue  # withdrawn meanwhile
            offer.pending[number].waits_for -= count
            self._say(offer)

    def _say(self, offer: _Offer) -> None:
        for number, part in list(offer.pending.items()):
            if part.waits_for > 0:
                return
            del offer.pending[number]
            if not offer.over:
                self._transceiver.respond_and_send_async(offer.leg.key, part.tokens, part.sources, is_last=part.is_last)

    def ended(self) -> set[str]:
        """Requests whose blocks nobody reads any more: vLLM frees them."""
        return {name for sent in self._transceiver.check_context_transfer_status() if (name := self._ended(sent))}

    def _ended(self, sent: SendOutcome) -> str:
        offer = self._open.pop(sent.key)
        if sent.failure is not TransferFailure.NONE:
            log.warning("request %s was not fetched: %s", sent.key, sent.reason or sent.failure.name.lower())
        offer.over = True
        if self.pins is not None and offer.pinned:
            self.pins.unpin(offer.pinned)
            offer.pinned = []
        if not offer.kept:
            return ""  # still computed: what is sampled is for nobody
        name = offer.request.request_id
        del self._of_request[name]
        return name


class PoolPins:
    """`BlockPins` on vLLM's BlockPool."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def pin(self, blocks: Sequence[int]) -> None:
        """They are not given to anybody else."""
        self._pool.touch([self._pool.blocks[one] for one in blocks])

    def unpin(self, blocks: Sequence[int]) -> None:
        """Once for each `pin`. The last ones are evicted first, as vLLM does it."""
        self._pool.free_blocks([self._pool.blocks[one] for one in reversed(blocks)])
