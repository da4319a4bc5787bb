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
from isthmus_worker.engine import ContextReady, EngineDescription, EngineLoad, Finished, HandoffReport
from isthmus_worker.process_engine import EngineLaunch, ProcessEngine
from isthmus_worker.wire.engine_frames import EngineEvent, LegEnded, LegReleased
from kvtransfer.errors import KVTransferError
from kvtransfer.local.client import HUB_VARIABLE
from kvtransfer.local.server import LocalServer
from kvtransfer.ports import (
    CancelTransfer,
    HubToRank,
    HubToScheduler,
    ReceiveOutcome,
    ReceiveRequest,
    SchedulerToHub,
    SendOutcome,
    TransferFailure,
)

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from kvtransfer.local.messages import LocalWelcome
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
        told = (description.weights_digest, description.attention_digest, description.kv_dtype)
        found = (facts.model.weights_digest, facts.model.attention_digest, facts.model.kv_dtype)
        if told != found or facts.tokens_per_block != description.tokens_per_block:
            await self._kill()
            raise StartError(
                f"vLLM's connector describes another model or block size than its front: {facts.model.kv_dtype}, "
                f"blocks of {facts.tokens_per_block}; front {description.kv_dtype}, {description.tokens_per_block}"
            )
        self._watcher = asyncio.create_task(self._watch(self._local), name="vllm-watch")
        return description

    def load(self) -> EngineLoad:
        """As last reported, with the prompts that are held for a peer."""
        return replace(super().load(), held_handoffs=len(self._held))

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
                if message.settled:
                    self._receiving.discard(key)
                    if key in self._done:
                        self._release(key)
            case _:
                pass

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
        if self._on_transfer is not None:
            self._on_transfer(message)

    def _rank_said(self, rank: int, message: Any) -> None:
        if self._on_rank is not None:
            self._on_rank(rank, message)

    # --- legs

    def _apply(self, event: EngineEvent) -> None:
        match event:
            case LegReleased(key):
                if key in self._receiving:
                    self._done.add(key)
                else:
                    self._release(key)
            case LegEnded(key, ContextReady()):
                super()._apply(event)
                if key in self._early:
                    del self._early[key]
                    self._release(key)
                else:
                    self._held.add(key)
            case LegEnded(key):
                super()._apply(self._reported(event))
            case _:
                super()._apply(event)

    def _release(self, key: RequestKey) -> None:
        self._done.discard(key)
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
