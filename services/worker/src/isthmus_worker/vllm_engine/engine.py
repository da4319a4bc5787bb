"""`VllmEngine`: the hub's end of vLLM. The front process is its child; vLLM's own processes connect by themselves.

A leg is released when vLLM's front and the hand-off are both done with it: the front knows nothing of blocks that are
held for a peer, or that a peer may still write.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isthmus_core.errors import StartError
from isthmus_worker.engine import (
    ContextReady,
    EngineDescription,
    EngineLoad,
    EngineRequest,
    Finished,
    HandoffReport,
    Tokens,
)
from isthmus_worker.process_engine import EngineLaunch, ProcessEngine
from isthmus_worker.vllm_engine.at_once import WaitedFor, Waiting
from isthmus_worker.wire.engine_frames import EngineEvent, LegEnded, LegReleased, LegTokens
from kvtransfer.errors import KVTransferError
from kvtransfer.local.client import HUB_VARIABLE
from kvtransfer.local.server import LocalServer
from kvtransfer.ports import (
    BindContext,
    BindFailed,
    BindNews,
    Bound,
    CancelTransfer,
    FirstTokensArrived,
    HubToRank,
    HubToScheduler,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    SendOffer,
    SendOutcome,
    TransferFailure,
)

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from isthmus_worker.process_engine.legs import LegStream
    from kvtransfer.local.messages import LocalScheduler, LocalWelcome
    from kvtransfer.rank_info import RankInfo

logger = logging.getLogger(__name__)

# vLLM's processes introduce themselves before the front says that it is ready.
_INTRODUCED_S = 10.0
_EXIT_S = 10.0
# Outcomes of offers whose leg has not been heard of yet.
_MAX_EARLY = 4096


class VllmEngine(ProcessEngine):
    """A `ProcessEngine` whose ranks are processes of vLLM. `welcome` None: an instance that hands nothing off."""

    def __init__(self, launch: EngineLaunch, instance_id: str, welcome: LocalWelcome | None, **callbacks: Any) -> None:
        super().__init__(launch, instance_id, **callbacks)
        self._welcome, self._local = welcome, None if welcome is None else self._open(launch, welcome)
        self._infos: tuple[RankInfo, ...] = ()
        self._waited_for, self._waiting = WaitedFor(), Waiting()
        self._ended_here: set[RequestKey] = set()
        self._watcher: asyncio.Task[None] | None = None
        # Keys whose pages are exposed; whose pages are held; that the front has done with; whose offer was over first.
        self._receiving: set[RequestKey] = set()
        self._held: set[RequestKey] = set()
        self._done: set[RequestKey] = set()
        self._early: dict[RequestKey, None] = {}
        self._outcomes: dict[RequestKey, list[ReceiveOutcome]] = {}

    def _open(self, launch: EngineLaunch, welcome: LocalWelcome) -> LocalServer:
        return LocalServer(
            welcome,
            on_transfer=self._heard,
            on_rank=self._rank_said,
            on_exit=lambda rank, reason: logger.info("rank %d: %s", rank, reason),
            lock_fd=launch.lock_fd,
        )

    @property
    def rank_infos(self) -> tuple[RankInfo, ...]:
        """What the peers must know of each rank, in flat order; complete once the engine has started."""
        return self._infos

    @property
    def ranks(self) -> int:
        """Ranks of the instance."""
        return max(1, len(self._infos))

    async def start(self) -> EngineDescription:
        """As the base; also waits for vLLM's processes to introduce themselves."""
        if self._local is None:
            return await super().start()
        environment = {**self._launch.environment, HUB_VARIABLE: await self._local.start()}
        self._launch = replace(self._launch, environment=environment)
        description = await super().start()
        try:
            facts, self._infos = await self._local.ready(_INTRODUCED_S)
        except KVTransferError as error:
            await self._kill()
            raise StartError(f"vLLM has started, its connector has not: {error}") from error
        if differences := _differences(description, facts):
            await self._kill()
            raise StartError(f"vLLM's connector describes another engine than its front: {differences}")
        self._watcher = asyncio.create_task(self._watch(self._local), name="vllm-watch")
        return description

    def load(self) -> EngineLoad:
        """As last reported, with the prompts that are held for a peer."""
        return replace(super().load(), held_handoffs=len(self._held))

    def submit(self, request: EngineRequest) -> LegStream:
        """As the base."""
        stream = super().submit(request)
        if request.generation_waits:
            self._waited_for.begin(request.key)
        self._waiting.begin(request)
        return stream

    def abort(self, key: RequestKey) -> None:
        """As the base; pages that are held are withdrawn."""
        if key in self._held and self._on_transfer is not None:
            self._on_transfer(CancelTransfer(key))
        else:
            super().abort(key)

    # --- the hand-off

    def deliver(self, message: HubToScheduler) -> None:
        """To the connector in vLLM's scheduler."""
        if self._local is None:
            return
        self._local.deliver(message)
        match message:
            case SendOutcome(key):
                self._waited_for.over(key)
                if key in self._held:
                    self._held.discard(key)
                    self._release(key)
                elif key in self._done:
                    self._release(key)
                else:
                    self._early[key] = None
                    while len(self._early) > _MAX_EARLY:
                        self._early.pop(next(iter(self._early)))
            case ReceiveOutcome(key):
                self._outcomes.setdefault(key, []).append(message)
                if not message.settled and message.failure is not TransferFailure.NONE:
                    super().deliver(message)  # vLLM itself waits until no peer can write any more
                if message.settled:
                    self._receiving.discard(key)
                    if key in self._done:
                        self._release(key)
            case Bound() | FirstTokensArrived() | BindFailed():
                self._news(message)

    def _news(self, news: BindNews) -> None:
        end = self._waiting.heard(news)
        if end is not None:
            self._apply(end)
            self._ended_here.add(news.key)
            self.abort(news.key)
        elif isinstance(news, FirstTokensArrived):
            super().deliver(news)  # the front ends single answers

    def send_to_rank(self, rank: int, message: HubToRank) -> None:
        """The way of the transfer hub to a rank role. Raises ConnectionError when it is gone."""
        if self._local is None:
            raise ConnectionError("this instance hands nothing off")
        self._local.rank_port(rank).send(message)

    def kill(self, rank: int, reason: str) -> None:
        """SIGKILL: the ranks of vLLM end together, and the front with them."""
        if self._local is not None:
            self._local.kill(f"rank {rank}: {reason}")
        super().kill(0, reason)

    def _heard(self, message: SchedulerToHub) -> None:
        if isinstance(message, ReceiveRequest):
            self._receiving.add(message.key)
        self._tell_hub(message)
        if isinstance(message, BindContext | SendOffer):
            self._tell_hub(*self._waited_for.bound(message.key))

    def _tell_hub(self, *messages: SchedulerToHub) -> None:
        if self._on_transfer is not None:
            for message in messages:
                self._on_transfer(message)

    def _rank_said(self, rank: int, message: Any) -> None:
        if self._on_rank is not None:
            self._on_rank(rank, message)

    # --- legs

    def _apply(self, event: EngineEvent) -> None:
        match event:
            case LegTokens(key, said):
                if isinstance(said, Tokens):
                    self._waited_for.tokens(key, said)
                super()._apply(event)
            case LegReleased(key):
                if key in self._receiving or self._waited_for.holds(key):
                    self._done.add(key)
                else:
                    self._release(key)
            case LegEnded(key) if key in self._ended_here:
                pass  # the front says that it was aborted
            case LegEnded(key, ContextReady()):
                super()._apply(event)
                if key in self._early:
                    del self._early[key]
                    self._release(key)
                else:
                    self._held.add(key)
                self._tell_hub(*self._waited_for.ended(key, event.end))
            case LegEnded(key):
                self._waiting.over(key)
                super()._apply(self._reported(event))
                self._tell_hub(*self._waited_for.ended(key, event.end))
            case _:
                super()._apply(event)

    def _release(self, key: RequestKey) -> None:
        self._done.discard(key)
        self._ended_here.discard(key)
        self._early.pop(key, None)
        self._outcomes.pop(key, None)
        super()._apply(LegReleased(key))

    def _reported(self, event: LegEnded) -> LegEnded:
        """What the hub knows of the hand-off belongs into the report of the leg."""
        outcomes = self._outcomes.get(event.key, [])
        if not outcomes:
            return event
        failures = tuple(
            one.reason or one.failure.name.lower() for one in outcomes if one.failure is not TransferFailure.NONE
        )
        stats = outcomes[-1].stats
        came = outcomes[-1].failure is TransferFailure.NONE
        report = replace(
            event.report,
            handoff=HandoffReport(stats.writers, stats.total) if came and stats is not None else None,
            handoff_failures=failures,
            recomputed=not came,
        )
        end = Finished(report) if isinstance(event.end, Finished) else event.end
        return replace(event, end=end, report=report)

    # --- the end

    async def _watch(self, local: LocalServer) -> None:
        """vLLM's own processes are gone: its front notices, or is made to."""
        reason = await asyncio.shield(local.lost)
        await asyncio.sleep(_EXIT_S)
        super().kill(0, reason)

    async def _last_words(self) -> None:
        """No process of vLLM may outlive the report that the engine has exited."""
        if self._watcher is not None:
            self._watcher.cancel()
        if self._local is not None:
            self._local.kill("the front of vLLM has exited")
            if not await self._local.wait_exited(_EXIT_S):
                logger.error("processes of vLLM do not exit although they were killed")
            await self._local.close()
        self._held.clear()
        self._done.clear()
        self._receiving.clear()


def _differences(front: EngineDescription, connector: LocalScheduler) -> str:
    """What the two processes of vLLM say differently, with both values: a peer would trust either."""
    model = connector.model
    said = {
        "weights": (model.weights_digest.hex(), front.weights_digest.hex()),
        "attention": (model.attention_digest.hex(), front.attention_digest.hex()),
        "KV dtype": (model.kv_dtype, front.kv_dtype),
        "tokens of a block": (str(connector.tokens_per_block), str(front.tokens_per_block)),
    }
    return "; ".join(f"{name} {one}, front {other}" for name, (one, other) in said.items() if one != other)
