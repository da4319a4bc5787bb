"""generation_first: a generation leg that goes on without its context leg.

A context leg that its own instance ends says so to the generation instance too, which may then compute the prompt
itself. The router waits a moment for that before it gives the pair up: going on there costs one prefill, going on
elsewhere a prefill, a hand-off and a place.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

import grpc
from isthmus.v1 import errors_pb2

from isthmus_core.errors import IsthmusError, RemoteError, TransferFailed
from isthmus_core.keys import RequestKey
from isthmus_router.ports import LegEvent, Tokens

# For the news to go from instance to instance. It takes milliseconds while their stream stands.
PATIENCE_S = 2.0
_CODES = frozenset({grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})


def _may_be_taken_over(error: IsthmusError) -> bool:
    """True for the end of a context leg that had begun. What was refused, or lost with its instance, has another place
    to go; nobody would tell the generation instance."""
    ended = error.code in _CODES or isinstance(error.detail, errors_pb2.TransferFailed)
    return isinstance(error, RemoteError) and ended


class TakingOver:
    """Of one try. `taken`: the generation leg goes on alone. `lost`: how its context leg had ended before."""

    def __init__(self, key: RequestKey) -> None:
        self._key = key
        self._begun = asyncio.Event()
        self._said: dict[int, Tokens] = {}
        self._context = ""
        self.lost: IsthmusError | None = None

    @property
    def taken(self) -> bool:
        """True when the tokens of the generation leg are those of the whole answer."""
        return self._begun.is_set()

    def begin(self) -> None:
        """The generation leg says so."""
        self._begun.set()

    def told(self, first_tokens: tuple[Tokens, ...], instance_id: str) -> None:
        """The client has the first tokens of the context leg, which `instance_id` ran."""
        self._said = {chunk.sample: chunk for chunk in first_tokens}
        self._context = instance_id

    async def guarded(self, context_leg: AsyncGenerator[LegEvent, None]) -> AsyncGenerator[LegEvent, None]:
        """A context leg whose end may be made good by the generation leg: its error is raised when it is not."""
        try:
            async with aclosing(context_leg) as events:
                async for event in events:
                    yield event
        except IsthmusError as error:
            if self.taken:
                return
            if not _may_be_taken_over(error):
                raise
            self.lost = error
            try:
                await asyncio.wait_for(self._begun.wait(), PATIENCE_S)
            except TimeoutError:
                raise error from None

    def unsaid(self, event: LegEvent) -> LegEvent | None:
        """An event of a leg that has taken over, without what the client has already; None when nothing is left.

        Raises TransferFailed when the client has another first token than the one that the answer goes on from.
        """
        known = self._said.get(event.sample) if isinstance(event, Tokens) else None
        if known is None or not isinstance(event, Tokens):
            return event
        count = min(len(known.ids), len(event.ids))
        if event.ids[:count] != known.ids[:count]:
            reason = f"computed again, answer {event.sample} begins with other tokens than the client has"
            raise TransferFailed(self._key, self._context, reason)
        if known.reason is not None:
            return None
        left = replace(known, ids=known.ids[count:], logprobs=())
        if left.ids:
            self._said[event.sample] = left
        else:
            del self._said[event.sample]
        rest = replace(event, ids=event.ids[count:], logprobs=event.logprobs[count:])
        return rest if rest.ids or rest.reason is not None else None
