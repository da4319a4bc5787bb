"""The coordinator as a router with a local policy sees it: ids and models from it, placements from here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

from isthmus_core.errors import DuplicateRequest
from isthmus_core.keys import RequestKey
from isthmus_router.cluster_watch import ClusterView
from isthmus_router.coordinator_client import CoordinatorClient
from isthmus_router.coordinator_messages import Placement, ServedModel
from isthmus_router.local_policy import PowerOfTwo, RoundRobin, Unit, allowed, placement, units_of
from isthmus_router.ports import PlacementRequest

# Loads change all the time; who is there is looked up this often.
_REFRESH_S = 0.1


class LocalPlacement:
    """Implements `ports.Coordinator` over a client whose stream mints ids. `view()`: the cluster as last heard. One
    event loop owns it."""

    def __init__(
        self, client: CoordinatorClient, view: Callable[[], ClusterView], policy: str, clock: Callable[[], float]
    ) -> None:
        """`policy`: round_robin or power_of_two."""
        self._client, self._view, self._clock = client, view, clock
        self._own: Counter[bytes] = Counter()
        self._open: dict[int, Placement] = {}
        self._policy = (
            RoundRobin() if policy == RoundRobin.name else PowerOfTwo(lambda one: self._own[one], random.Random())
        )
        self._units: dict[str, tuple[Unit, ...]] = {}
        self._looked_at = float("-inf")

    @property
    def ready(self) -> bool:
        """True while the stream to the coordinator stands."""
        return self._client.ready

    def served(self) -> Sequence[ServedModel]:
        """Models that have a usable placement."""
        return self._client.served()

    def mint_id(self) -> int:
        """A new request id. Raises NoCapacity when the lease has lapsed."""
        return self._client.mint_id()

    async def select(self, question: PlacementRequest, timeout_s: float) -> Placement:
        """A placement, at once. Raises NoCapacity or DuplicateRequest."""
        if question.key.request_id in self._open:
            raise DuplicateRequest(question.key.request_id)
        now = self._clock()
        if now - self._looked_at >= _REFRESH_S:
            self._looked_at = now
            self._units = units_of(self._view())
        units = allowed(self._units.get(question.model, ()), question)
        context, generation = self._policy.choose(units, question.model)
        chosen = placement(context, generation, self._policy.name, len(units))
        self._open[question.key.request_id] = chosen
        self._own.update(_incarnations(chosen))
        return chosen

    def prefilled(self, key: RequestKey) -> None:
        """Nothing here depends on it."""

    def finish(self, key: RequestKey) -> None:
        """Release a placement."""
        chosen = self._open.pop(key.request_id, None)
        if chosen is not None:
            self._own.subtract(_incarnations(chosen))
            self._own += Counter()


def _incarnations(chosen: Placement) -> list[bytes]:
    pair = (chosen.context, chosen.generation)
    return [one.incarnation for one in pair if one is not None]
