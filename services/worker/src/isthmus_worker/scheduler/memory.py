"""The blocks of answers: what one needs, what it can share, and what it leaves for those that come later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_core import block_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from isthmus_core.keys import RequestKey
    from isthmus_worker.cache import BlockManager
    from isthmus_worker.scheduler.answer import Answer
    from isthmus_worker.scheduler.request import Request

_NONE: NDArray[np.int32] = np.empty(0, np.int32)


class Memory:
    """Block tables of answers, over the block manager.

    `root`: from a cache salt to the parent of a prompt's first block; None turns reuse off.
    """

    def __init__(self, blocks: BlockManager, root: Callable[[bytes], bytes] | None) -> None:
        self.blocks, self._root = blocks, root

    def table(self, answer: Answer) -> NDArray[np.int32]:
        """Blocks of an answer in token order."""
        return self.blocks.table(answer.holder)

    def prompt_table(self, answer: Answer) -> NDArray[np.int32]:
        """The blocks that hold its prompt."""
        return self.table(answer)[: self.blocks.blocks_for(answer.request.prompt_length)]

    def admit(self, answer: Answer, *, reuse: bool) -> bool:
        """Room for all tokens of an answer and one more, and for those that will part from it; False when it is not
        there. With `reuse` it begins behind the blocks that are here already. Without, all of its blocks are its own: a
        peer will write them."""
        shared = self._reusable(answer) if reuse else _NONE
        parting = {one.sample: self._own_blocks(answer, len(one.ids)) for one in answer.request.parting(answer)}
        count = self.blocks.blocks_for(answer.length + 1) - len(shared)
        if not self.blocks.can_allocate(count + sum(parting.values()), shared):
            return False
        self.blocks.allocate(answer.holder, count, shared)
        for sample, own in parting.items():
            self.blocks.allocate((answer.request.key, sample), own)
        answer.committed, answer.partial = len(shared), False
        answer.computed = len(shared) * self.blocks.tokens_per_block
        return True

    def more_for(self, answer: Answer) -> int:
        """Blocks that its next tokens need and that it has not."""
        return max(0, self.blocks.blocks_for(answer.length) - self.blocks.held(answer.holder))

    def release(self, answer: Answer) -> None:
        """Gives its blocks back, and those that were kept for answers that have not parted from it."""
        self.blocks.free(answer.holder)
        for one in answer.request.parting(answer):
            self.blocks.free((answer.request.key, one.sample))

    def renew(self, answer: Answer) -> bool:
        """Other blocks in place of all that an answer holds; False, and nothing changes, when there are too few."""
        return self.blocks.exchange(answer.holder)

    def set_aside(self, answer: Answer) -> None:
        """Its blocks are not its own any more: a peer may still write them. See `free_aside`."""
        self.blocks.rename(answer.holder, _aside(answer.request))
        for one in answer.request.parting(answer):
            self.blocks.free((answer.request.key, one.sample))

    def free_aside(self, request: Request) -> None:
        """Nobody can write them any more."""
        self.blocks.free(_aside(request))

    def part(self, answer: Answer, child: Answer) -> tuple[int, int] | None:
        """`child` goes on with the KV of the prompt. Full blocks are shared; returns (from, to) of the last one when it
        is partly filled: each of the two will write its own rest of it."""
        prompt = answer.request.prompt_length
        full = prompt // self.blocks.tokens_per_block
        table = self.table(answer)
        self.blocks.put_before(child.holder, table[:full])
        child.computed = prompt
        child.names, child.committed = answer.names[:full], min(full, answer.committed)
        child.partial = answer.partial
        if full * self.blocks.tokens_per_block == prompt:
            return None
        return int(table[full]), int(self.table(child)[full])

    def commit(self, answer: Answer) -> None:
        """Whatever blocks are complete by now can be found by others."""
        complete = answer.computed // self.blocks.tokens_per_block
        if self._root is None or answer.partial or complete <= answer.committed:
            return
        names = self._names(answer, complete)
        self.blocks.commit(answer.holder, answer.committed, names[answer.committed : complete])
        answer.committed = complete

    def distrust(self, request: Request) -> None:
        """What a request has computed may be wrong: nobody else may use it."""
        for answer in request.answers:
            if self.blocks.held(answer.holder):
                self.blocks.distrust(answer.holder)

    def _own_blocks(self, answer: Answer, first: int) -> int:
        """Blocks of an answer that parts with `first` tokens, beside those that it shares."""
        prompt = answer.request.prompt_length
        return self.blocks.blocks_for(prompt + first + 1) - prompt // self.blocks.tokens_per_block

    def _reusable(self, answer: Answer) -> NDArray[np.int32]:
        """At least one token is always computed: its logits are wanted."""
        if self._root is None:
            return _NONE
        full = (answer.length - 1) // self.blocks.tokens_per_block
        return self.blocks.find(self._names(answer, full)[:full])

    def _names(self, answer: Answer, count: int) -> list[bytes]:
        """At least the first `count` names; kept, because a waiting request asks again and again."""
        names = answer.names
        if len(names) < count and self._root is not None:
            size = self.blocks.tokens_per_block
            parent = names[-1] if names else self._root(answer.request.source.cache_salt)
            names += block_keys.chain(parent, answer.packed(len(names) * size, count * size), size)
        return names


def _aside(request: Request) -> tuple[RequestKey, str]:
    """Holder of what was set aside."""
    return (request.key, "set aside")
