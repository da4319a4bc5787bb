"""The blocks of answers: what one needs, what it can share, and what it leaves for those that come later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from isthmus_core import block_keys
from isthmus_worker.cache.base import Need, blocks_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from isthmus_core.keys import RequestKey
    from isthmus_worker.cache.base import CacheManager, Copy, Prefix
    from isthmus_worker.engine import EngineRequest
    from isthmus_worker.scheduler.answer import Answer
    from isthmus_worker.scheduler.request import Request


class Memory:
    """Block lists of answers, over a cache manager.

    `root`: from a cache salt to the parent of a prompt's first block; None turns reuse off. `step_tokens`: of one step
    at most: lists with a window get no more than that in advance.
    """

    def __init__(self, cache: CacheManager, root: Callable[[bytes], bytes] | None, step_tokens: int = 1 << 30) -> None:
        self.cache, self._root, self._step_tokens = cache, root, step_tokens

    def lists(self, answer: Answer) -> tuple[NDArray[np.int32], ...]:
        """Blocks of an answer in token order, for each block list."""
        return self.cache.lists(answer.holder)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return blocks_for(tokens, self.cache.tokens_per_block)

    def offered_lists(self, answer: Answer, end: int) -> tuple[NDArray[np.int32], ...]:
        """The blocks that hold its first `end` tokens, from token 0 on."""
        count = self.blocks_for(end)
        return tuple(one[:count] for one in self.lists(answer))

    def received_lists(self, answer: Answer) -> tuple[tuple[NDArray[np.int32], ...], tuple[int, ...]]:
        """Where a peer is to write the KV of the prompt: the blocks of each list from that of a token on, and this
        token: before it everything is here, or nobody sees it."""
        prompt, size = answer.request.prompt_length, self.cache.tokens_per_block
        begins = tuple(
            max(reused * size, 0 if window is None else prompt - window + 1)
            for reused, window in zip(answer.reused, self.cache.windows, strict=True)
        )
        lists = self.offered_lists(answer, prompt)
        return tuple(one[begin // size :] for one, begin in zip(lists, begins, strict=True)), begins

    def admit(self, answer: Answer, *, receive: bool, spare: int = 0) -> bool:
        """Room for all tokens of an answer and one more, for those that will part from it, and `spare` blocks more;
        False when it is not there. It begins behind the blocks that are here already. With `receive` a peer will write
        the prompt, as far as it is not: the next token to be computed is the one behind it."""
        prompt, cache = answer.request.prompt_length, self.cache
        prefix = self._reusable(answer, receive=receive)
        known = min(map(len, prefix.lists)) * cache.tokens_per_block
        end = answer.length + 1
        need = Need(prompt, end, end) if receive else Need(known, min(end, known + self._step_tokens), end)
        parting = {one.sample: self._parted(answer, len(one.ids)) for one in answer.request.parting(answer)}
        room = Need(0, spare * cache.tokens_per_block, spare * cache.tokens_per_block)
        if not cache.can_allocate((need, *parting.values(), room), prefix):
            return False
        cache.allocate(answer.holder, need, prefix)
        for sample, own in parting.items():
            cache.allocate((answer.request.key, sample), own)
        answer.reused = tuple(map(len, prefix.lists))
        answer.whole = cache.whole_from(prompt) if receive else (0,) * len(prefix.lists)
        # What was here of a received prompt has names already; naming it again changes nothing.
        answer.committed = 0 if receive else known // cache.tokens_per_block
        answer.computed = 0 if receive else known
        return True

    def prompt_names(self, request: EngineRequest) -> list[bytes]:
        """Names of the whole blocks of a prompt that is not an answer's yet; none when nothing is reused here."""
        if self._root is None:
            return []
        tokens = np.array(request.prompt, "<u4").tobytes()
        return block_keys.chain(self._root(request.cache_salt), tokens, self.cache.tokens_per_block)

    def cached_tokens(self, names: Sequence[bytes], prompt: int, *, receive: bool) -> int:
        """Tokens at the beginning of a prompt of so many tokens that need not be computed, or received, now."""
        names = names[: (prompt - 1) // self.cache.tokens_per_block]
        prefix = self.cache.find_received(names, prompt) if receive else self.cache.find(names)
        return self._full_blocks([len(one) for one in prefix.lists]) * self.cache.tokens_per_block

    def reused_tokens(self, answer: Answer) -> int:
        """Tokens at its beginning that were here when it was admitted, in the lists that keep everything."""
        return self._full_blocks(answer.reused) * self.cache.tokens_per_block

    def _full_blocks(self, counts: Sequence[int]) -> int:
        """The smallest count of the lists that keep everything; of all lists when none does."""
        full = [count for count, window in zip(counts, self.cache.windows, strict=True) if window is None]
        return min(full or counts)

    def can_step(self, answer: Answer, count: int) -> bool:
        """True when the next `count` tokens of an answer have blocks, or can have them."""
        return self.cache.can_reach(answer.holder, answer.computed, answer.computed + count)

    def step(self, answer: Answer, count: int) -> None:
        """Blocks for its next `count` tokens; gives back what they do not see."""
        self.cache.reach(answer.holder, answer.computed, answer.computed + count)

    def release(self, answer: Answer) -> None:
        """Gives its blocks back, and those that were kept for answers that have not parted from it."""
        self.cache.free(answer.holder)
        for one in answer.request.parting(answer):
            self.cache.free((answer.request.key, one.sample))

    def renew(self, answer: Answer) -> bool:
        """Other blocks in place of all that a peer was to write; False, and nothing changes, when there are too few."""
        if not self.cache.can_exchange(answer.holder, answer.reused):
            return False
        self.cache.exchange(answer.holder, answer.reused)
        return True

    def set_aside(self, answer: Answer) -> None:
        """Its blocks are not its own any more: a peer may still write them. See `free_aside`."""
        self.cache.rename(answer.holder, _aside(answer.request))
        for one in answer.request.parting(answer):
            self.cache.free((answer.request.key, one.sample))

    def free_aside(self, request: Request) -> None:
        """Nobody can write them any more."""
        self.cache.free(_aside(request))

    def part(self, answer: Answer, child: Answer) -> list[Copy]:
        """`child` goes on with the KV of the prompt. Full blocks are shared; returns what is to be copied of the last
        one when it is partly filled: each of the two will write its own rest of it."""
        prompt = answer.request.prompt_length
        full = prompt // self.cache.tokens_per_block
        copies = self.cache.fork(answer.holder, child.holder, prompt)
        child.computed = prompt
        child.names, child.committed = answer.names[:full], min(full, answer.committed)
        child.whole = answer.whole
        return copies

    def commit(self, answer: Answer) -> None:
        """Whatever blocks are complete by now can be found by others."""
        complete = answer.computed // self.cache.tokens_per_block
        if self._root is None or complete <= answer.committed:
            return
        names = self._names(answer, complete)[:complete]
        self.cache.commit(answer.holder, names, answer.committed, answer.whole)
        answer.committed = complete

    def distrust(self, request: Request) -> None:
        """What a request has computed may be wrong: nobody else may use it."""
        for answer in request.answers:
            if self.cache.holds(answer.holder):
                self.cache.distrust(answer.holder)

    def _parted(self, answer: Answer, first: int) -> Need:
        """What an answer that parts with `first` tokens has beside the blocks that it shares."""
        prompt = answer.request.prompt_length
        end = prompt + first + 1
        return Need(prompt, end, end, prompt // self.cache.tokens_per_block)

    def _reusable(self, answer: Answer, *, receive: bool) -> Prefix:
        """At least one token is always computed, or received: its logits, or the end of the hand-off, are wanted."""
        prompt = answer.request.prompt_length
        full = ((prompt if receive else answer.length) - 1) // self.cache.tokens_per_block
        names = self._names(answer, full)[:full]
        return self.cache.find_received(names, prompt) if receive else self.cache.find(names)

    def _names(self, answer: Answer, count: int) -> list[bytes]:
        """At least the first `count` names; kept, because a waiting request asks again. None if reuse is off."""
        names = answer.names
        if len(names) < count and self._root is not None:
            size = self.cache.tokens_per_block
            parent = names[-1] if names else self._root(answer.request.source.cache_salt)
            names += block_keys.chain(parent, answer.packed(len(names) * size, count * size), size)
        return names


def _aside(request: Request) -> tuple[RequestKey, str]:
    """Holder of what was set aside."""
    return (request.key, "set aside")
