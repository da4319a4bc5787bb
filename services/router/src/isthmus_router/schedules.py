"""Which schedule a split request gets: the configured one, unless its pair is known not to understand it."""

from __future__ import annotations

import logging
from collections import OrderedDict

from isthmus.v1 import errors_pb2

from isthmus_core.errors import RemoteError
from isthmus_router.ports import Placement, Schedule

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


class Schedules:
    """Pairs are named by the incarnations of both instances: an updated one gets another chance."""

    def __init__(self, wanted: Schedule) -> None:
        self._wanted = wanted
        self._refused: OrderedDict[_Pair, None] = OrderedDict()

    def of(self, placement: Placement) -> Schedule | None:
        """None when one instance does everything."""
        pair = _pair(placement)
        if pair is None:
            return None
        return Schedule.CONTEXT_FIRST if pair in self._refused else self._wanted

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
