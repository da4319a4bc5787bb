"""One attempt at one request, as the router sees it, and the phase of the protocol it is in."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.ports import RequestKey, TransferFailure

    from .node import Node
    from .pages import Hold
    from .script import FaultKind, RequestPlan


class Phase(Enum):
    """Where a fault finds an attempt. Told from outside, by what the world can see."""

    # Both legs are started at once; the context leg is not scheduled yet.
    INTENDED = "intended"
    # Pages are offered, the generation leg has not asked, or will ask once more.
    HELD = "held"
    # Asked; nothing has been posted.
    ASKED = "asked"
    # Bytes are moving.
    WRITING = "writing"
    # All posted bytes are over, the generation leg has not heard.
    REPORTING = "reporting"
    # Failed or cancelled; the pages are not given back yet.
    FAILING = "failing"
    # The cache has arrived; the ranks have not all applied the decision to decode.
    AGREEING = "agreeing"
    # The generation leg is over, the context leg is not.
    RELEASING = "releasing"


@dataclass(eq=False, slots=True)
class Attempt:
    """`told`: the generation leg has an answer. `received`, `sent`: how the legs have ended. `computed`: when the
    last chunk was offered. `first`: the first tokens have come; `first_failed`: why they will not. `withdrawn`: the
    context leg will not start. `agreeing`: the ranks have not all applied the decision."""

    plan: RequestPlan
    key: RequestKey
    context: Node
    source: Hold | None = None
    generation: Node | None = None
    target: Hold | None = None
    told: bool = False
    cancelled: bool = False
    withdrawn: bool = False
    agreeing: bool = False
    finished: bool = False
    first: bool = False
    first_failed: TransferFailure | None = None
    computed: float | None = None
    received: TransferFailure | None = None
    sent: TransferFailure | None = None
    faults: set[FaultKind] = field(default_factory=set["FaultKind"])

    @property
    def src_dp(self) -> int:
        """Attention-dp group of the context leg: a later attempt comes to another one."""
        return self.context.group(self.plan.number + self.key.attempt)

    @property
    def phase(self) -> Phase | None:
        """None when both legs are over."""
        if self.agreeing:
            return Phase.AGREEING
        if self.received is not None:
            return Phase.RELEASING if self.source and self.sent is None and self.context.alive else None
        if self.generation is None or self.target is None:
            return self._before_asking
        if self.told or self.cancelled:
            return Phase.FAILING
        if self.target.writes:
            return Phase.WRITING
        return Phase.REPORTING if self.target.posted else Phase.ASKED

    @property
    def _before_asking(self) -> Phase:
        if self.sent is not None:
            return Phase.FAILING
        return Phase.HELD if self.source is not None else Phase.INTENDED

    def involves(self, node: Node) -> bool:
        """One of the legs runs there, or did before the instance was restarted, or will."""
        return node.name in (self.plan.context, self.plan.generation)
