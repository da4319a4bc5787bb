"""The connector in vLLM's scheduler process: what its hooks mean for the scheduler role of the transceiver.

    prefill    `offers`    request_finished ──offer──▶ hub … SendOutcome ──▶ finished_sending: vLLM frees the blocks
    decode     `loads`     update_state_after_alloc ──ask──▶ hub … ReceiveOutcome ──▶ finished_recving, failed_recving

What the hub has said is applied when metadata for a step is built, and comes back to the scheduler through the workers,
as vLLM wants it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from kvtransfer.integrations.vllm.block_lists import BlockLists, Blocks, RankGroup
from kvtransfer.integrations.vllm.loads import Loads
from kvtransfer.integrations.vllm.offers import BlockPins, End, Offers, Part
from kvtransfer.integrations.vllm.params import DecodeLeg, ParamsInvalid, PrefillLeg, decode_params, read_params

if TYPE_CHECKING:
    from kvtransfer.ports import Holder
    from kvtransfer.transceiver.scheduler import SchedulerTransceiver

log = logging.getLogger(__name__)

_ENDS = {"FINISHED_LENGTH_CAPPED": End.GOES_ON, "FINISHED_STOPPED": End.STOPPED}


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


@dataclass(slots=True)
class StepNews:
    """What the hub has said since the last step, by vLLM's request ids.

    `pack`: what is about to be offered, for every worker to answer when it has run the step, and to bring into its
    plain copy before if it keeps one; `unpack`: what has come there. Blocks by vLLM's groups.
    """

    sent: set[str] = field(default_factory=set[str])
    received: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    pack: dict[Part, Blocks] = field(default_factory=dict[Part, Blocks])
    unpack: list[Blocks] = field(default_factory=list[Blocks])


def _no_blocks(_: str) -> None:
    return None


class ConnectorScheduler:
    """One engine. All methods are called on vLLM's scheduler thread. `groups` are given before the first request.

    `workers`: processes of the engine. `packs`: they keep a plain copy of their cache, for what the kernels read can
    not be handed off.
    """

    def __init__(
        self,
        transceiver: SchedulerTransceiver,
        here: Holder,
        *,
        prefills: bool,
        workers: int = 1,
        packs: bool = False,
    ) -> None:
        self._here, self._prefills, self._packs = here, prefills, packs
        self._legs: dict[str, PrefillLeg] = {}
        self._offers = Offers(transceiver, workers=workers, packs=packs)
        self._loads = Loads(transceiver)

    def set_groups(self, groups: Sequence[RankGroup]) -> None:
        """Every layer group of every rank."""
        self._offers.lists = self._loads.lists = BlockLists(groups)

    def set_pins(self, pins: BlockPins) -> None:
        """Prompts are offered in chunks from now on, where a decode waits for them."""
        self._offers.pins = pins

    @property
    def is_idle(self) -> bool:
        """True when nothing is handed over and nothing waits to be reported."""
        return self._offers.is_idle and self._loads.is_idle

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
        elif isinstance(leg, PrefillLeg):
            self._legs[request.request_id] = leg
        elif leg is not None:
            self._loads.begin(request, leg)

    def matched_tokens(self, request: VllmRequest, computed: int) -> tuple[int | None, bool]:
        """get_num_new_matched_tokens: (tokens beyond `computed` that come from the peer, asynchronously); None: it is
        not known yet."""
        wanted = self._loads.wanted(request.request_id, request.num_tokens, computed)
        return wanted, bool(wanted)

    def allocated(self, request: VllmRequest, blocks: Sequence[Sequence[int]], external: int) -> None:
        """update_state_after_alloc: `blocks` by vLLM's groups, from token 0."""
        leg = self._legs.get(request.request_id)
        if leg is not None:
            self._offers.scheduled(leg, request)
        else:
            self._loads.allocated(request.request_id, request.num_tokens, blocks, external)

    def finished(self, request: VllmRequest, blocks: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """request_finished: (vLLM keeps the blocks until `StepNews` names the request, parameters for the answer)."""
        leg = self._legs.pop(request.request_id, None)
        if leg is None:
            self._loads.finished(request.request_id)
            return False, None
        tokens = self._offers.finished(leg, request, blocks, _ENDS.get(request.status.name, End.DROPPED))
        params = decode_params(DecodeLeg(leg.key, self._here, tokens)) if tokens else None
        return self._offers.keeps(request.request_id), params

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        block_ids: Callable[[str], Sequence[Sequence[int]] | None] = _no_blocks,
    ) -> StepNews:
        """build_connector_meta: what workers do and report in this step. `scheduled`: tokens of each request in it,
        `block_ids`: the blocks of one of them by vLLM's groups."""
        news = StepNews(sent=self._offers.ended(), pack=self._offers.step(scheduled or {}, block_ids))
        for load in self._loads.step():
            news.received.add(load.request_id)
            if load.failed:
                news.failed.add(load.request_id)
            elif self._packs:
                news.unpack.append(load.blocks)
        return news

    def reported(self, counts: Mapping[Part, int], received: Iterable[str]) -> None:
        """update_connector_output: so many workers have run the step of these parts; these requests have their
        blocks."""
        self._offers.packed(counts)
        self._loads.reported(received)
