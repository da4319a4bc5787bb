"""Which schedule a split request gets: the one that is wanted, unless its pair is known not to understand it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum

from isthmus.v1 import errors_pb2

from isthmus_core.errors import RemoteError
from isthmus_router.ports import Placement, Schedule, Shape

logger = logging.getLogger(__name__)

# Pairs that are remembered; one that is forgotten only costs a refused call.
_MAX_PAIRS = 4096
_Pair = tuple[bytes, bytes]


def is_refusal(error: RemoteError) -> bool:
    """True when a generation instance, or its peer, does not know how to start both legs at once."""
    detail = error.detail
    if isinstance(detail, errors_pb2.ScheduleUnsupported):
        return True
    # An instance that is older than the schedule overlooks `context_instance`.
    return isinstance(detail, errors_pb2.InvalidField) and detail.field == "context_phase"


class Wish(Enum):
    """How a client wants a request to be divided. Values are those of `isthmus.v1.RequestSchedule`."""

    CONTEXT_FIRST = 1
    GENERATION_FIRST = 2
    UNSPLIT = 3


@dataclass(frozen=True, slots=True)
class ScheduleRule:
    """How requests are divided when the client does not say: prompts of at least `generation_first_from` tokens start
    both legs at once; None: none does."""

    generation_first_from: int | None = None

    @classmethod
    def of(cls, schedule: str, tokens: int) -> ScheduleRule:
        """The rule of `router.schedule` and `router.generation_first_tokens`."""
        return cls({"context_first": None, "generation_first": 0, "by_length": tokens}[schedule])

    def decide(self, wish: Wish | None, prompt_tokens: int) -> tuple[Schedule, Shape]:
        """When the generation leg of a split request starts, and whether the request may, or must, be split. A wish is
        an order: a cluster that can not follow it refuses."""
        if wish is not None:
            schedule = Schedule.GENERATION_FIRST if wish is Wish.GENERATION_FIRST else Schedule.CONTEXT_FIRST
            return schedule, Shape.UNSPLIT if wish is Wish.UNSPLIT else Shape.SPLIT
        early = self.generation_first_from is not None and prompt_tokens >= self.generation_first_from
        return Schedule.GENERATION_FIRST if early else Schedule.CONTEXT_FIRST, Shape.ANY


@dataclass(frozen=True, slots=True)
class LocalPrefillRule:
    """When a generation instance had better compute a prompt itself than receive its cache.

    Computing delays the answers that the instance makes, by `prefill_us_per_token` for each token that is not cached
    there. A hand-off delays the answer to this request, by `handoff_us` and by `handoff_us_per_token` for each token of
    the prompt. The cheaper one is chosen. `enabled` False: never.
    """

    enabled: bool = False
    prefill_us_per_token: float = 50.0
    handoff_us: float = 3000.0
    handoff_us_per_token: float = 1.0

    def most_uncached(self, prompt_tokens: int) -> int:
        """Uncached tokens up to which it is the generation instance's; 0 = never."""
        if not self.enabled:
            return 0
        handoff = self.handoff_us + self.handoff_us_per_token * prompt_tokens
        return min(prompt_tokens, int(handoff / self.prefill_us_per_token))


class Schedules:
    """Pairs are named by the incarnations of both instances: an updated one gets another chance."""

    def __init__(self) -> None:
        self._refused: OrderedDict[_Pair, None] = OrderedDict()

    def of(self, placement: Placement, wanted: Schedule) -> Schedule | None:
        """None when one instance does everything."""
        pair = _pair(placement)
        if pair is None:
            return None
        return Schedule.CONTEXT_FIRST if pair in self._refused else wanted

    def refused(self, placement: Placement, reason: str) -> None:
        """The pair can not start both legs at once; said once for each pair."""
        pair = _pair(placement)
        if pair is None or pair in self._refused:
            return
        self._refused[pair] = None
        if len(self._refused) > _MAX_PAIRS:
            self._refused.popitem(last=False)
        logger.warning(
            "requests of this pair use context_first in place of generation_first: %s",
            reason,
            extra={"peer": placement.generation.instance_id},
        )


def _pair(placement: Placement) -> _Pair | None:
    context = placement.context
    return None if context is None else (context.incarnation, placement.generation.incarnation)
