"""Requests from their arrival to their release: the ends, told once each, and the answers that part from a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_worker.scheduler.answer import Answer, Phase
from isthmus_worker.scheduler.events import RequestFinished, RequestReleased, SchedulerEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_core.errors import IsthmusError
    from isthmus_core.keys import RequestKey
    from isthmus_worker.cache.base import Copy
    from isthmus_worker.scheduler.memory import Memory
    from isthmus_worker.scheduler.places import Places
    from isthmus_worker.scheduler.request import Request


class Live:
    """All requests of which anything is left. `copies`: blocks that the next step has to copy first."""

    def __init__(self, places: Places, memory: Memory, emit: Callable[[SchedulerEvent], None]) -> None:
        self._places, self._memory, self.emit = places, memory, emit
        self.requests: dict[RequestKey, Request] = {}
        self.copies: list[Copy] = []

    def finish(self, request: Request, error: IsthmusError | None) -> None:
        """The end of the client's side, once."""
        if not request.over:
            request.over = True
            self.emit(RequestFinished(request.key, error, request.report()))

    def release(self, request: Request) -> None:
        """The one way out. While a peer may touch pages that were set aside the key stays."""
        for answer in request.answers:
            self._places.drop(answer)
        request.answers.clear()
        if not request.set_aside:
            del self.requests[request.key]
            self.emit(RequestReleased(request.key))

    def settled(self, request: Request) -> None:
        """Nobody can touch the pages of its failed hand-off any more."""
        if not request.set_aside:
            self.release(request)
            return
        self._memory.free_aside(request)
        request.set_aside = False
        if request.over:
            self.release(request)

    def end(self, answer: Answer) -> None:
        """An answer has had its last chunk; the last answer ends the request."""
        request = answer.request
        request.answers.remove(answer)
        self._places.drop(answer)
        if not request.answers:
            self.finish(request, None)
            self.release(request)

    def part(self, request: Request) -> None:
        """The prompt is there: answers with a first token that is not their last one go on by themselves."""
        for first in request.parting(request.lead):
            child = Answer(request, first.sample, first.ids, Phase.DECODE)
            if first.reason is not None:
                self._memory.cache.free(child.holder)
                continue
            self.copies += self._memory.part(request.lead, child)
            request.answers.append(child)
            self._places.join(child)
        request.unborn = []
