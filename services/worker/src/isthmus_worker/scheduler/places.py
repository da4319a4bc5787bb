"""The queue and the running batch, oldest first, and who has to make room."""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError
from isthmus_worker.scheduler.answer import PINNED, RUNNING, Answer, Phase

if TYPE_CHECKING:
    from isthmus_core.keys import RequestKey
    from isthmus_worker.scheduler.memory import Memory


def _by_age(answer: Answer) -> tuple[int, int]:
    return answer.order


class Places:
    """At most `max_running` answers run. An answer of `waiting` holds no blocks, one of `running` all that it needs.

    What is preempted is one answer, the youngest, not a whole request: its own blocks are usually enough, the others of
    its request go on, and the prompt that it shares with them is still here when it comes back.
    """

    def __init__(self, memory: Memory, max_running: int) -> None:
        self._memory, self._max_running = memory, max_running
        self.waiting: list[Answer] = []
        self.running: list[Answer] = []

    def enqueue(self, answer: Answer) -> None:
        """An answer that may be computed, or whose cache may come, when there is room for it."""
        insort(self.waiting, answer, key=_by_age)

    def admit(self) -> Answer | None:
        """Moves the head of the queue into the batch, with its blocks; None when there is no room for it. Strictly in
        order of age: a small one does not overtake a big one, which would wait for ever."""
        if not self.waiting:
            return None
        answer = self.waiting[0]
        taken = sum(_width(one) for one in self.running)
        if taken + _width(answer) > self._max_running:
            return None
        needs_cache = answer.request.needs_cache
        # What a peer writes can not be taken back for a while: what is decoded here keeps room for its next tokens.
        spare = self.spare_blocks() if needs_cache else 0
        if not self._memory.admit(answer, receive=needs_cache, spare=spare):
            return None
        del self.waiting[0]
        answer.move(Phase.RECEIVING if needs_cache else Phase.PREFILL)
        if not needs_cache:
            answer.drafts = ()
        insort(self.running, answer, key=_by_age)
        return answer

    def join(self, answer: Answer) -> None:
        """A new answer whose blocks are there."""
        insort(self.running, answer, key=_by_age)

    def pin(self, answer: Answer, phase: Phase) -> None:
        """Out of the batch; a peer may touch the blocks, and they stay."""
        if answer.phase in RUNNING:
            self.running.remove(answer)
        answer.move(phase)

    def drop(self, answer: Answer) -> None:
        """The one way out: no place, no block."""
        if answer.phase is Phase.WAITING:
            self.waiting.remove(answer)
        elif answer.phase is not Phase.AWAITING:
            self._memory.release(answer)
            if answer.phase in RUNNING:
                self.running.remove(answer)
        answer.move(Phase.RELEASED)

    def requeue(self, answer: Answer) -> None:
        """Out of the batch and back into the queue, without its blocks."""
        answer.move(Phase.WAITING)
        answer.request.preempted()
        self.running.remove(answer)
        if self._memory.cache.holds(answer.holder):
            self._memory.release(answer)
        answer.computed = answer.committed = 0
        insort(self.waiting, answer, key=_by_age)

    def spare_blocks(self) -> int:
        """Blocks that running answers may need for their next tokens: one for each that decodes."""
        return sum(one.phase is Phase.DECODE for one in self.running)

    def room_for(self, answer: Answer, count: int, step: int) -> bool:
        """Makes sure that the next `count` tokens of an answer have blocks. False when it can not take part in the step
        `step`: it had to give up its own, or those who could give theirs are in the step already."""
        while not self._memory.can_step(answer, count):
            youngest = next(one for one in reversed(self.running) if one.phase not in PINNED)
            if youngest.stepped[0] == step:
                return False
            self.requeue(youngest)
            if youngest is answer:
                return False
        self._memory.step(answer, count)
        return True

    def running_requests(self) -> set[RequestKey]:
        """Requests with an answer in the batch."""
        return {answer.request.key for answer in self.running}

    def check_empty(self) -> None:
        """Raises InternalError for a leak."""
        cache = self._memory.cache
        cache.check_integrity()
        if self.waiting or self.running or cache.used:
            raise InternalError(
                f"nothing is left to do, but {len(self.waiting)} answers wait, {len(self.running)} run and "
                f"{cache.used} blocks are held"
            )


def _width(answer: Answer) -> int:
    """Places in the batch that an answer takes, or will take when others part from it."""
    return 1 + len(answer.request.parting(answer))
