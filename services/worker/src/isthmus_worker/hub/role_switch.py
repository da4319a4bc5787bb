"""A change of role without a restart: no new work, what there is ends, then the other role."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from isthmus_worker.wire.registration import RoleOrder, RoleView
from kvtransfer.rank_info import InstanceRole

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoleEdges:
    """What a change touches. `tell`: the coordinator, which gives no new work while it is told of a change; `idle`:
    returns when nothing of the old role is open, raises TimeoutError after that many seconds; `take`: the new role,
    TimeoutError too."""

    tell: Callable[[RoleView], None]
    idle: Callable[[float], Awaitable[None]]
    take: Callable[[InstanceRole], Awaitable[None]]


class RoleSwitch:
    """The role of an instance. One change at a time; an order that comes meanwhile is refused."""

    def __init__(self, role: InstanceRole, possible: tuple[InstanceRole, ...], deadline_s: float) -> None:
        self.role, self.possible = role, possible
        self._deadline_s = deadline_s
        self._task: asyncio.Task[None] | None = None

    def order(self, order: RoleOrder, edges: RoleEdges) -> None:
        """An operator wants another role."""
        if self._task is not None and not self._task.done():
            edges.tell(RoleView(self.role, refused=f"{order.role.name}: another change of role is going on"))
            return
        if order.role not in self.possible:
            edges.tell(RoleView(self.role, refused=f"{order.role.name}: this instance can not take it"))
            return
        self._task = asyncio.create_task(self._change(order, edges), name="role-switch")

    async def close(self) -> None:
        """The instance stops."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _change(self, order: RoleOrder, edges: RoleEdges) -> None:
        if order.role is self.role:
            edges.tell(RoleView(self.role))
            return
        deadline_s = self._deadline_s if order.deadline_s is None else order.deadline_s
        logger.info("changing role from %s to %s", self.role.name.lower(), order.role.name.lower())
        edges.tell(RoleView(self.role, changing_to=order.role))
        try:
            await edges.idle(deadline_s)
            await edges.take(order.role)
        except TimeoutError:
            reason = f"{order.role.name}: work of role {self.role.name} was open after {deadline_s:g} s"
            logger.warning("role stays: %s", reason)
            edges.tell(RoleView(self.role, refused=reason))
            return
        self.role = order.role
        edges.tell(RoleView(self.role))
        logger.info("role is %s now", self.role.name.lower())
