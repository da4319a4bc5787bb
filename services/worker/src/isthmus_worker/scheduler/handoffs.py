"""The scheduler's use of the transceiver: offer, ask, cancel, and what the outcomes mean for a client.

When both legs of a request start at once: intend, bind, offer in chunks, and the first tokens over the stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from isthmus_core.errors import HandoffExpired, InternalError, IsthmusError, ScheduleUnsupported, TransferFailed
from isthmus_worker.wire.tokens import first_tokens_from_bytes, first_tokens_to_bytes
from kvtransfer.ports import RankBlocks, ReceiveIntent, ReceiveRequest, TokenRange, TransferFailure

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from isthmus_core.keys import RequestKey
    from isthmus_worker.engine import Tokens
    from isthmus_worker.scheduler.request import Request
    from kvtransfer.ports import BindFailed, BindNews, Holder, ReceiveOutcome, SendOutcome
    from kvtransfer.transceiver.layer_progress import LayerProgress
    from kvtransfer.transceiver.policy import Next


class Transceiver(Protocol):
    """The part of `kvtransfer.transceiver.scheduler.SchedulerTransceiver` that the scheduler uses."""

    def respond_and_send_async(
        self,
        key: RequestKey,
        tokens: TokenRange,
        sources: Sequence[RankBlocks],
        *,
        is_last: bool = True,
        dp_rank: int = 0,
        step: int = 0,
    ) -> None: ...

    def bind_context(self, key: RequestKey, dp_rank: int = 0) -> None: ...

    def send_first_tokens(self, key: RequestKey, payload: bytes) -> None: ...

    def intend_to_receive(self, intent: ReceiveIntent) -> None: ...

    def check_bindings(self) -> list[BindNews]: ...

    def request_and_receive_async(self, request: ReceiveRequest) -> None: ...

    def check_context_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0) -> list[SendOutcome]: ...

    def check_gen_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0) -> list[ReceiveOutcome]: ...

    def next_step(self, outcome: ReceiveOutcome) -> Next: ...

    def give_up(self, key: RequestKey) -> Next: ...

    @property
    def recomputes(self) -> bool: ...

    def can_hold(self, blocks: int) -> bool: ...

    def cancel_request(self, key: RequestKey) -> bool: ...


@dataclass(frozen=True, slots=True)
class Held:
    """Layer group `group` of the page table of rank `rank`; its blocks are those of list `block_list` of a sequence."""

    rank: int
    group: int
    block_list: int = 0


class Handoffs:
    """Of one attention-dp group, `dp_rank`, whose ranks hold what `held` says. Blocks are given as one array for each
    block list of the cache. `hold_s`: how long a context instance holds pages, for the text of the error.
    `reserve_early`: a generation leg takes its pages before its context leg is scheduled. `layers`: of the model; the
    end of a prompt is offered before it is computed, to be sent layer by layer.
    """

    def __init__(
        self,
        transceiver: Transceiver,
        held: Sequence[Held],
        hold_s: float,
        dp_rank: int = 0,
        *,
        reserve_early: bool = False,
        layers: LayerProgress | None = None,
    ) -> None:
        self._transceiver, self._held, self._hold_s = transceiver, tuple(held), hold_s
        self.dp_rank, self.reserve_early, self._layers = dp_rank, reserve_early, layers

    def bind(self, request: Request) -> None:
        """The context leg is scheduled: a generation leg that waits for it may expose its pages."""
        self._transceiver.bind_context(request.key, self.dp_rank)

    @property
    def by_layer(self) -> bool:
        """True when the end of a prompt is offered before it is computed."""
        return self._layers is not None

    def offer(self, request: Request, blocks: tuple[NDArray[np.int32], ...], end: int, *, early: bool = False) -> None:
        """Offers the KV of the prompt up to token `end`, whose blocks are given. They stay pinned until the
        SendOutcome. `early`: the next step computes it."""
        step = self._layers.next_step if early and self._layers is not None else 0
        tokens, is_last = TokenRange(request.offered, end), end == request.prompt_length
        self._transceiver.respond_and_send_async(
            request.key, tokens, self._lists(blocks), is_last=is_last, dp_rank=self.dp_rank, step=step
        )
        request.offered = end

    def send_first(self, request: Request, first_tokens: Sequence[Tokens]) -> None:
        """What the prefill of a bound context leg has sampled."""
        self._transceiver.send_first_tokens(request.key, first_tokens_to_bytes(first_tokens))

    def intend(self, request: Request) -> None:
        """The generation leg waits for its context leg."""
        self._transceiver.intend_to_receive(ReceiveIntent(request.key, _holder(request), request.source.trace))

    def bindings(self) -> list[BindNews]:
        """News of context legs that are waited for."""
        return self._transceiver.check_bindings()

    def first_tokens(self, request: Request, payload: bytes) -> tuple[Tokens, ...]:
        """What the context leg has sampled. Raises TransferFailed when it can not be read."""
        try:
            return first_tokens_from_bytes(payload)
        except ValueError as error:
            raise TransferFailed(request.key, _holder(request).instance_id, f"first tokens: {error}") from error

    def receive(self, request: Request, blocks: tuple[NDArray[np.int32], ...], begins: tuple[int, ...]) -> None:
        """Exposes blocks and asks for the KV of the prompt from token `begins` on; the first block of each list holds
        it. They stay exposed until a settled ReceiveOutcome.

        The executor is synchronous: no kernel of a former owner of the blocks is running.
        """
        tokens = TokenRange(min(begins), request.prompt_length)
        self._transceiver.request_and_receive_async(
            ReceiveRequest(
                request.key,
                tokens,
                self._lists(blocks, begins),
                replace(_holder(request), dp_rank=request.context_dp),
                request.source.trace,
                dp_rank=self.dp_rank,
            )
        )

    def cancel(self, key: RequestKey) -> bool:
        """True: no write can touch the blocks. False: ask again when something was heard."""
        return self._transceiver.cancel_request(key)

    def sends(self) -> list[SendOutcome]:
        """Offers that are over."""
        return self._transceiver.check_context_transfer_status()

    def receives(self) -> list[ReceiveOutcome]:
        """Caches that have arrived or will not."""
        return self._transceiver.check_gen_transfer_status()

    def next_step(self, outcome: ReceiveOutcome) -> Next:
        """What to do about a cache that has arrived or has not; once for each outcome, in order."""
        return self._transceiver.next_step(outcome)

    def give_up(self, key: RequestKey) -> Next:
        """In place of another try."""
        return self._transceiver.give_up(key)

    def may_take_over(self, request: Request, news: BindFailed) -> bool:
        """True when a leg whose context leg is lost computes the prompt itself."""
        known = news.failure is not TransferFailure.PEER_UNKNOWN
        return known and request.source.may_take_over and self._transceiver.recomputes

    def can_hold(self, blocks: int) -> bool:
        """True when so many more blocks may be held for generation instances."""
        return self._transceiver.can_hold(blocks)

    def error(self, request: Request, outcome: ReceiveOutcome) -> IsthmusError:
        """What the client of a failed hand-off is told."""
        if outcome.failure in (TransferFailure.EXPIRED, TransferFailure.NOT_HELD):
            return HandoffExpired(request.key, self._hold_s, outcome.reason)
        reason = outcome.reason or outcome.failure.name.lower().replace("_", " ")
        return TransferFailed(request.key, _holder(request).instance_id, reason)

    def unbound(self, request: Request, news: BindFailed) -> IsthmusError:
        """What the client of a leg is told that waits for a context leg in vain."""
        if news.failure is TransferFailure.PEER_UNKNOWN:
            return ScheduleUnsupported(_holder(request).instance_id, news.reason)
        return TransferFailed(request.key, _holder(request).instance_id, news.reason)

    def _lists(self, blocks: tuple[NDArray[np.int32], ...], begins: tuple[int, ...] = ()) -> tuple[RankBlocks, ...]:
        return tuple(
            RankBlocks(one.rank, one.group, blocks[one.block_list], begins[one.block_list] if begins else 0)
            for one in self._held
        )


def _holder(request: Request) -> Holder:
    """Who has, or will have, the KV of the prompt of a generation leg."""
    phase, context = request.source.context_phase, request.source.context
    if context is not None:
        return context
    if phase is None:
        raise InternalError(f"request {request.key} has no context instance to receive from")
    return phase.holder
