"""The decode's side of the connector: whose cache is asked for when, and what becomes of a load.

    the prefill is done      allocated ──▶ ask ─┬─▶ arrived ─▶ vLLM schedules the request
    both at once    intend ─▶ bound ─▶ the same └─▶ failed, settled ─▶ computed here, or failed
                    first tokens, whenever they come, go behind the prompt; vLLM hears of the load when both are there

Requests with one key are answers to one prompt. The first that has blocks asks; the others wait, and then find its
blocks in the prefix cache. What vLLM is told about a load comes when no peer can write into its blocks any more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from isthmus_core.generation import first_tokens_from_bytes
from kvtransfer.errors import KVTransferError
from kvtransfer.integrations.vllm.block_lists import BlockLists, Blocks
from kvtransfer.ports import (
    BindFailed,
    Bound,
    FirstTokensArrived,
    ReceiveIntent,
    ReceiveRequest,
    TokenRange,
    TransferFailure,
)
from kvtransfer.transceiver.policy import Next

if TYPE_CHECKING:
    from kvtransfer.integrations.vllm.params import DecodeLeg
    from kvtransfer.ports import ReceiveOutcome, RequestKey
    from kvtransfer.transceiver.scheduler import SchedulerTransceiver

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Want:
    """A request of vLLM and the cache it wants. `asks`: nobody has asked for it yet. `complete`: what the prefill has
    sampled is behind the prompt. `ended`: that has ended the answer."""

    request: Any
    leg: DecodeLeg
    asks: bool = True
    complete: bool = True
    ended: bool = False


@dataclass(slots=True)
class _Load:
    """`over`: the request is gone, its blocks are not free yet."""

    want: _Want
    asked: ReceiveRequest
    blocks: Blocks
    over: bool = False


@dataclass(frozen=True, slots=True)
class Loaded:
    """A load that is settled: no peer writes into its blocks any more."""

    request_id: str
    blocks: Blocks
    failed: bool


@dataclass(slots=True)
class _Intent:
    """A prefill that was started at the same time. `settled`: a load that waits for its first tokens."""

    bound: bool = False
    settled: list[tuple[_Want, Loaded]] = field(default_factory=list[tuple[_Want, Loaded]])


class Loads:
    """Of one engine."""

    def __init__(self, transceiver: SchedulerTransceiver) -> None:
        self._transceiver = transceiver
        self.lists = BlockLists()
        # Requests that have no load yet and want one.
        self._wanting: dict[str, _Want] = {}
        self._loads: dict[RequestKey, _Load] = {}
        # By the request that has loaded: others that wait until vLLM has its blocks in the prefix cache.
        self._told: dict[str, RequestKey] = {}
        # Something may still be heard of their prefills.
        self._intents: dict[RequestKey, _Intent] = {}
        # Holders that are only told that nothing of theirs is needed.
        self._releases: set[RequestKey] = set()
        self._settled: list[Loaded] = []

    @property
    def is_idle(self) -> bool:
        """True when nothing is loaded or waited for."""
        return not (self._loads or self._releases or self._intents or self._told or self._settled)

    def begin(self, request: Any, leg: DecodeLeg) -> None:
        """vLLM's request wants a cache."""
        if leg.waits and leg.key not in self._intents:
            try:
                self._transceiver.intend_to_receive(ReceiveIntent(leg.key, leg.holder, leg.trace))
            except KVTransferError as error:
                log.error("request %s computes its prompt: %s", request.request_id, error)
                return
            self._intents[leg.key] = _Intent()
        self._wanting[request.request_id] = _Want(request, leg, complete=not leg.waits)

    def wanted(self, request_id: str, length: int, computed: int) -> int | None:
        """Tokens beyond `computed` that are to come for a prompt of `length` tokens; None: ask again in the next
        step."""
        want = self._wanting.get(request_id)
        if want is None:
            return 0
        leg, intent = want.leg, self._intents.get(want.leg.key)
        unbound = intent is not None and not intent.bound
        if want.ended or unbound or self._others_load(leg.key):
            return None
        if not want.asks:
            return 0 if want.complete else None
        tokens = min(leg.tokens, length)
        if self.lists.stateful and tokens == length:
            log.error("request %s: a state can not be taken one token back; its prompt is computed", request_id)
            return 0
        return max(0, tokens - computed)

    def allocated(self, request_id: str, length: int, blocks: Sequence[Sequence[int]], external: int) -> None:
        """`external` tokens of the prompt have blocks and are to come."""
        # Once: after a preemption the holder has long given its pages up.
        want = self._wanting.pop(request_id, None)
        if want is None or not want.asks:
            return
        leg = want.leg
        if external <= 0:
            self._release(leg)
            self._forget(leg.key)
            return
        end = min(leg.tokens, length)
        begin = end - external
        destinations = self.lists.of_range(blocks, begin, end)
        asked = ReceiveRequest(leg.key, TokenRange(begin, end), destinations, leg.holder, leg.trace)
        self._loads[leg.key] = _Load(want, asked, self.lists.whole(blocks, begin, end))
        self._ask(self._loads[leg.key])

    def finished(self, request_id: str) -> None:
        """The request is over, wherever it was."""
        want = self._wanting.pop(request_id, None)
        self.reported((request_id,))
        for intent in self._intents.values():
            self._settled += [one for _, one in intent.settled if one.request_id == request_id]
            intent.settled = [one for one in intent.settled if one[1].request_id != request_id]
        load = next((one for one in self._loads.values() if one.want.request.request_id == request_id), None)
        if load is not None:
            if not load.over:
                load.over = True
                self._transceiver.cancel_request(load.want.leg.key)
        elif want is not None:
            self._left(want)

    def _left(self, want: _Want) -> None:
        """A request that has not loaded anything is gone."""
        key = want.leg.key
        if self._of(key) or self._others_load(key):
            return
        intent = self._intents.get(key)
        if intent is None:
            if want.asks and not want.ended:
                self._release(want.leg)
        elif not intent.settled:
            del self._intents[key]
            self._transceiver.cancel_request(key)

    def reported(self, request_ids: Iterable[str]) -> None:
        """vLLM has been told that these have their blocks: others of their prompts go on with the next step."""
        for request_id in request_ids:
            key = self._told.pop(request_id, None)
            if key is not None:
                self._forget(key)

    def step(self) -> list[Loaded]:
        """What has become of loads since the last step."""
        for news in self._transceiver.check_bindings():
            match news:
                case Bound():
                    self._bound(news)
                case FirstTokensArrived():
                    self._first(news)
                case BindFailed():
                    self._unbound(news)
        for outcome in self._transceiver.check_gen_transfer_status():
            self._received(outcome)
        settled, self._settled = self._settled, []
        return settled

    def _bound(self, news: Bound) -> None:
        if news.key in self._intents:
            self._intents[news.key].bound = True
        for want in self._of(news.key):
            want.leg = replace(want.leg, holder=replace(want.leg.holder, dp_rank=news.dp_rank))

    def _first(self, news: FirstTokensArrived) -> None:
        """What the prefill has sampled goes behind the prompts. An answer that has ended is aborted by the worker."""
        intent = self._intents.pop(news.key, None)
        try:
            first = {one.sample: one for one in first_tokens_from_bytes(news.payload)}
        except ValueError as error:
            log.error("first tokens of %s can not be read: %s", news.key, error)
            first = {}
        load, settled = self._loads.get(news.key), [] if intent is None else intent.settled
        loaded = [one for one, _ in settled] if load is None else [load.want]
        for want in (*self._of(news.key), *loaded):
            chunk = first.get(want.leg.answer)
            if chunk is None or chunk.reason is not None:
                want.ended = True
            else:
                append_tokens(want.request, chunk.ids)
            want.complete = True
        self._settled += [one for _, one in settled]

    def _unbound(self, news: BindFailed) -> None:
        """The worker fails the leg; until then it may compute its prompt."""
        log.warning("the prefill of %s does not come: %s", news.key, news.reason)
        intent = self._intents.pop(news.key, None)
        self._settled += [] if intent is None else [one for _, one in intent.settled]
        for want in self._of(news.key):
            want.complete = True
        if news.key not in self._loads:
            self._forget(news.key)

    def _ask(self, load: _Load) -> None:
        try:
            self._transceiver.request_and_receive_async(load.asked)
        except KVTransferError as error:
            log.error("request %s can not be asked for: %s", load.want.leg.key, error)
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
        request_id, key = load.want.request.request_id, load.want.leg.key
        del self._loads[key]
        settled = Loaded(request_id, load.blocks, failed)
        intent = self._intents.get(key)
        if intent is None or load.over:
            self._settled.append(settled)
        else:
            intent.settled.append((load.want, settled))
        if self._of(key):
            self._told[request_id] = key

    def _of(self, key: RequestKey) -> list[_Want]:
        return [want for want in self._wanting.values() if want.leg.key == key]

    def _others_load(self, key: RequestKey) -> bool:
        """True while another request loads this prompt, or has and vLLM does not know it yet."""
        return key in self._loads or key in self._told.values()

    def _forget(self, key: RequestKey) -> None:
        """Nobody asks for the key any more: the prompt is in the prefix cache, or computed."""
        for want in self._of(key):
            want.asks = False

    def _release(self, leg: DecodeLeg) -> None:
        """Nothing is needed: the holder is told so by a receive of nothing."""
        nothing, none = TokenRange(leg.tokens, leg.tokens), self.lists.none(leg.tokens)
        try:
            self._transceiver.request_and_receive_async(ReceiveRequest(leg.key, nothing, none, leg.holder, leg.trace))
            self._releases.add(leg.key)
        except KVTransferError as error:
            log.warning("the holder of %s keeps its pages until they expire: %s", leg.key, error)


def append_tokens(request: Any, ids: Sequence[int]) -> None:
    """Lets vLLM's request, which has not been scheduled yet, go on behind its prompt: as vLLM itself does it when a
    prompt comes in pieces."""
    request.prompt_token_ids.extend(ids)
    request._all_token_ids.extend(ids)  # vLLM has no other way to it
    request.num_prompt_tokens = len(request.prompt_token_ids)
    request.update_block_hashes()
