"""The connector in vLLM's scheduler process: what its hooks mean for the scheduler role of the transceiver.

    prefill    request_finished ──offer──▶ hub … SendOutcome ──▶ finished_sending: vLLM frees the blocks
    decode     update_state_after_alloc ──ask──▶ hub … ReceiveOutcome ──▶ finished_recving: vLLM schedules it
                                                                    └─ failed ─▶ failed_recving: computed here, or fails

What the hub has said is applied when metadata for a step is built, and comes back to the scheduler through the workers,
as vLLM wants it. A failed load is reported when it is settled: until then a peer may still write into its blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvtransfer.errors import KVTransferError
from kvtransfer.integrations.vllm.params import DecodeLeg, ParamsInvalid, PrefillLeg, decode_params, read_params
from kvtransfer.ports import Holder, RankBlocks, ReceiveRequest, TokenRange, TransferFailure
from kvtransfer.transceiver.policy import Next

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvtransfer.ports import ReceiveOutcome, RequestKey
    from kvtransfer.transceiver.scheduler import SchedulerTransceiver

log = logging.getLogger(__name__)

# vLLM's block that stands for tokens nobody needs any more.
_NULL_BLOCK = 0
_HANDED_OFF = ("FINISHED_LENGTH_CAPPED",)


class VllmRequest(Protocol):
    """The part of vLLM's Request that is used."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    kv_transfer_params: dict[str, Any] | None

    @property
    def num_tokens(self) -> int: ...

    @property
    def status(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Layer group `group` of rank `rank` uses the block ids of vLLM's group `source`; `ratio` of its blocks of `tokens`
    tokens make one of vLLM's. `windowed`: of its blocks only the last ones may be there."""

    rank: int
    group: int
    source: int
    ratio: int
    tokens: int
    windowed: bool = False


Blocks = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class StepNews:
    """What the hub has said since the last step, by vLLM's request ids.

    For workers that keep a plain copy of their cache: `pack` what is about to be offered, `unpack` what has come;
    blocks by vLLM's groups.
    """

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    pack: dict[str, Blocks] = field(default_factory=dict[str, Blocks])
    unpack: list[Blocks] = field(default_factory=list[Blocks])


@dataclass(slots=True)
class _Load:
    request_id: str
    leg: DecodeLeg
    wanted: ReceiveRequest
    blocks: Blocks
    over: bool = False


@dataclass(slots=True)
class _Offer:
    key: RequestKey
    tokens: TokenRange
    sources: tuple[RankBlocks, ...]
    waits_for: int


class ConnectorScheduler:
    """One engine. All methods are called on vLLM's scheduler thread. `groups` are given before the first request.

    `packing`: number of workers that keep a plain copy of their cache, 0 when what the kernels read is handed off.
    """

    def __init__(self, transceiver: SchedulerTransceiver, here: Holder, *, prefills: bool, packing: int = 0) -> None:
        self._transceiver, self._here, self._prefills = transceiver, here, prefills
        self._packing = packing
        # By vLLM's request id, until every worker has packed.
        self._offers: dict[str, _Offer] = {}
        self._groups: tuple[RankGroup, ...] = ()
        self._legs: dict[str, PrefillLeg | DecodeLeg | None] = {}
        self._loads: dict[RequestKey, _Load] = {}
        self._sends: dict[RequestKey, str] = {}
        # Holders that are only told that nothing of theirs is needed.
        self._releases: set[RequestKey] = set()
        self._news = StepNews()

    def set_groups(self, groups: Sequence[RankGroup]) -> None:
        """Every layer group of every rank."""
        self._groups = tuple(groups)

    @property
    def is_idle(self) -> bool:
        """True when nothing is handed over and nothing waits to be reported."""
        news = self._news
        told = news.sent or news.received or news.failed or news.pack
        return not (self._loads or self._sends or self._releases or told)

    # --- vLLM's hooks

    def new_request(self, request: VllmRequest) -> None:
        """on_new_request. Parameters that make no sense for this instance are ignored, loudly: vLLM computes the prompt
        as if there were none."""
        leg: PrefillLeg | DecodeLeg | None = None
        try:
            leg = read_params(request.kv_transfer_params)
        except ParamsInvalid as error:
            log.error("request %s hands nothing off: %s", request.request_id, error)
        if leg is not None and isinstance(leg, PrefillLeg) is not self._prefills:
            wanted, role = ("prefill", "kv_consumer") if isinstance(leg, PrefillLeg) else ("decode", "kv_producer")
            log.error("request %s is for a %s and this is a %s", request.request_id, wanted, role)
            leg = None
        self._legs[request.request_id] = leg

    def matched_tokens(self, request: VllmRequest, computed: int) -> tuple[int, bool]:
        """get_num_new_matched_tokens: (tokens beyond `computed` that come from the peer, asynchronously)."""
        leg = self._legs.get(request.request_id)
        if not isinstance(leg, DecodeLeg):
            return 0, False
        tokens = min(leg.tokens, request.num_tokens)
        if any(self._stateful(group) for group in self._groups) and tokens == request.num_tokens:
            log.error("request %s: a state can not be taken one token back; its prompt is computed", request.request_id)
            tokens = 0
        wanted = tokens - computed
        return (wanted, True) if wanted > 0 else (0, False)

    def allocated(self, request: VllmRequest, blocks: Sequence[Sequence[int]], external: int) -> None:
        """update_state_after_alloc: `blocks` by vLLM's groups, from token 0."""
        leg = self._legs.get(request.request_id)
        if not isinstance(leg, DecodeLeg):
            return
        # Once: after a preemption the holder has long given its pages up.
        self._legs[request.request_id] = None
        if external <= 0:
            self._release(leg)
            return
        tokens = min(leg.tokens, request.num_tokens)
        begin = tokens - external
        destinations = tuple(self._list(group, blocks, begin, tokens) for group in self._groups)
        wanted = ReceiveRequest(leg.key, TokenRange(begin, tokens), destinations, leg.holder, leg.trace)
        held = tuple(self._whole(group, ids, begin, tokens) for group, ids in enumerate(blocks))
        self._loads[leg.key] = _Load(request.request_id, leg, wanted, held)
        self._ask(self._loads[leg.key])

    def finished(self, request: VllmRequest, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """request_finished: (vLLM keeps the blocks until `StepNews` names the request, parameters for the answer)."""
        leg = self._legs.pop(request.request_id, None)
        if isinstance(leg, DecodeLeg):  # never scheduled
            self._release(leg)
            return False, None
        load = next((one for one in self._loads.values() if one.request_id == request.request_id), None)
        if load is not None and not load.over:
            load.over = True
            self._transceiver.cancel_request(load.leg.key)
        if not isinstance(leg, PrefillLeg) or request.status.name not in _HANDED_OFF:
            return False, None
        tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        sources = tuple(self._list(group, blocks, 0, tokens) for group in self._groups)
        try:
            if self._packing:
                # Its number must be known before anybody can ask; the blocks follow when the workers have packed.
                self._transceiver.bind_context(leg.key)
                self._offers[request.request_id] = _Offer(leg.key, TokenRange(0, tokens), sources, self._packing)
                held = tuple(self._whole(group, ids, 0, tokens) for group, ids in enumerate(blocks))
                self._news.pack[request.request_id] = held
            else:
                self._transceiver.respond_and_send_async(leg.key, TokenRange(0, tokens), sources)
        except KVTransferError as error:
            log.error("request %s can not be handed off: %s", request.request_id, error)
            return False, None
        self._sends[leg.key] = request.request_id
        return True, decode_params(DecodeLeg(leg.key, self._here, tokens))

    def step(self) -> StepNews:
        """build_connector_meta: what workers report in this step."""
        for sent in self._transceiver.check_context_transfer_status():
            self._news.sent.add(self._sends.pop(sent.key))
            if sent.failure is not TransferFailure.NONE:
                log.warning("request %s was not fetched: %s", sent.key, sent.reason or sent.failure.name.lower())
        for outcome in self._transceiver.check_gen_transfer_status():
            self._received(outcome)
        news, self._news = self._news, StepNews()
        return news

    def packed(self, counts: Mapping[str, int]) -> None:
        """update_connector_output: so many workers have packed the blocks of these requests."""
        for request_id, count in counts.items():
            offer = self._offers[request_id]
            offer.waits_for -= count
            if offer.waits_for <= 0:
                del self._offers[request_id]
                if self._transceiver.has_inflight_transfer(offer.key):  # nobody has withdrawn it meanwhile
                    self._transceiver.respond_and_send_async(offer.key, offer.tokens, offer.sources)

    # --- the hand-off

    def _ask(self, load: _Load) -> None:
        try:
            self._transceiver.request_and_receive_async(load.wanted)
        except KVTransferError as error:
            log.error("request %s can not be asked for: %s", load.leg.key, error)
            self._end(load, failed=True)

    def _received(self, outcome: ReceiveOutcome) -> None:
        step = self._transceiver.next_step(outcome)
        if outcome.key in self._releases:
            if step is Next.RETRY:
                self._transceiver.give_up(outcome.key)
            if outcome.settled:
                self._releases.discard(outcome.key)
            return
        load = self._loads[outcome.key]
        failed = outcome.failure is not TransferFailure.NONE
        if failed and step is not Next.FREE and step is not Next.WAIT:
            log.warning("hand-off of %s failed: %s", outcome.key, outcome.reason or outcome.failure.name.lower())
        if not outcome.settled:
            return
        if step is Next.RETRY and not load.over:
            # Settled: no earlier writer can touch the blocks any more.
            self._ask(load)
            return
        if step is Next.RETRY:
            self._transceiver.give_up(outcome.key)
        self._end(load, failed=failed)

    def _end(self, load: _Load, *, failed: bool) -> None:
        del self._loads[load.leg.key]
        if self._packing and not failed:
            self._news.unpack.append(load.blocks)
        self._news.received.add(load.request_id)
        if failed:
            self._news.failed.add(load.request_id)

    def _release(self, leg: DecodeLeg) -> None:
        """Nothing is needed: the holder is told so by a receive of nothing."""
        nothing = TokenRange(leg.tokens, leg.tokens)
        none = np.empty(0, np.int32)
        lists = tuple(RankBlocks(one.rank, one.group, none, leg.tokens) for one in self._groups)
        try:
            self._transceiver.request_and_receive_async(ReceiveRequest(leg.key, nothing, lists, leg.holder, leg.trace))
            self._releases.add(leg.key)
        except KVTransferError as error:
            log.warning("the holder of %s keeps its pages until they expire: %s", leg.key, error)

    def _whole(self, group: int, ids: Sequence[int], begin: int, end: int) -> tuple[int, ...]:
        """vLLM's own blocks of tokens [begin, end) that are there."""
        size = next((one.tokens * one.ratio for one in self._groups if one.source == group), 0)
        if not size:
            return ()
        return tuple(one for one in ids[begin // size : -(-end // size)] if one != _NULL_BLOCK)

    @staticmethod
    def _stateful(group: RankGroup) -> bool:
        return group.tokens == 0

    def _list(self, group: RankGroup, blocks: Sequence[Sequence[int]], begin: int, end: int) -> RankBlocks:
        """Blocks of tokens [begin, end), in the rank's own blocks."""
        ids = np.asarray(blocks[group.source], np.int32)
        if self._stateful(group):
            return RankBlocks(group.rank, group.group, ids[:1], begin)
        if group.ratio > 1:
            ids = (ids[:, None] * np.int32(group.ratio) + np.arange(group.ratio, dtype=np.int32)).reshape(-1)
        ids = ids[begin // group.tokens : -(-end // group.tokens)]
        if group.windowed:
            ids = _without_null(ids, group.ratio)
        return RankBlocks(group.rank, group.group, ids, begin)


def _without_null(ids: NDArray[np.int32], ratio: int) -> NDArray[np.int32]:
    return np.where(ids // ratio == _NULL_BLOCK, np.int32(-1), ids)


def rank_groups(facts: Mapping[int, Sequence[tuple[int, int, int, bool]]]) -> tuple[RankGroup, ...]:
    """From what every rank says about its layer groups: (source, ratio, tokens of a block or 0, windowed) each."""
    return tuple(RankGroup(rank, number, *one) for rank in sorted(facts) for number, one in enumerate(facts[rank]))
