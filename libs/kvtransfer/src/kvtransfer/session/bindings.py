"""The context side of generation_first: joins intents of peers with context legs that are scheduled, in either order.

What was said for an attempt is said again when its intent comes again, for a while also after its end: the stream that
carried it may have broken.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtransfer.errors import TransferStateError
from kvtransfer.messages import Bind, FirstTokens, NotBound
from kvtransfer.session.actions import Emit, PeerId, ToPeer

if TYPE_CHECKING:
    from kvtransfer.ports import BindContext, RequestKey, SendFirstTokens


@dataclass(slots=True, eq=False)
class _Binding:
    """`ended`: why the context leg will not go on; None while it may. `handed_off`: its cache has been delivered, only
    the first tokens may still come."""

    peer: PeerId | None = None
    dp_rank: int | None = None
    payload: bytes | None = None
    ended: str | None = None
    handed_off: bool = False


class Bindings:
    """Attempts of one context instance; `limit` bounds those that are over or only intended. `emit` must not call
    back."""

    def __init__(self, limit: int, emit: Emit) -> None:
        self._limit, self._emit = limit, emit
        self._known: OrderedDict[RequestKey, _Binding] = OrderedDict()

    def intent(self, peer: PeerId, key: RequestKey) -> None:
        """KvIntent. Answered as soon as something is known; one for an attempt of another peer is refused."""
        binding = self._get(key)
        if binding.peer not in (None, peer):
            self._emit(ToPeer(peer, NotBound(key, "another instance waits for this attempt")))
            return
        binding.peer = peer
        if binding.dp_rank is not None:
            self._emit(ToPeer(peer, Bind(key, binding.dp_rank)))
        if binding.payload is not None:
            self._emit(ToPeer(peer, FirstTokens(key, binding.payload)))
        elif binding.ended is not None:
            self._emit(ToPeer(peer, NotBound(key, binding.ended)))

    def scheduled(self, bind: BindContext) -> None:
        """The context leg runs. Raises TransferStateError when the attempt is bound already."""
        binding = self._get(bind.key)
        if binding.dp_rank is not None and binding.ended is None:
            raise TransferStateError(bind.key, f"is bound to group {binding.dp_rank} already")
        binding.dp_rank, binding.payload, binding.ended, binding.handed_off = bind.dp_rank, None, None, False
        if binding.peer is not None:
            self._emit(ToPeer(binding.peer, Bind(bind.key, bind.dp_rank)))

    def sampled(self, first: SendFirstTokens) -> None:
        """The prefill of a bound attempt has sampled. Nothing when it is over already."""
        binding = self._known.get(first.key)
        if binding is None or binding.dp_rank is None or binding.ended is not None:
            return
        binding.payload = first.payload
        if binding.peer is not None:
            self._emit(ToPeer(binding.peer, FirstTokens(first.key, first.payload)))

    def handed_off(self, key: RequestKey) -> None:
        """The cache of the attempt has been delivered. That may be before anything was sampled."""
        binding = self._known.get(key)
        if binding is not None:
            binding.handed_off = True

    def over(self, key: RequestKey, reason: str) -> None:
        """The context leg has failed or was withdrawn. Who still waits for its first tokens is told."""
        binding = self._known.get(key)
        if binding is None or binding.dp_rank is None or binding.ended is not None:
            return
        binding.ended = reason
        if binding.peer is not None and binding.payload is None:
            self._emit(ToPeer(binding.peer, NotBound(key, reason)))

    def _get(self, key: RequestKey) -> _Binding:
        binding = self._known.get(key)
        if binding is None:
            binding = self._known[key] = _Binding()
            self._forget_some()
        return binding

    def _forget_some(self) -> None:
        if len(self._known) <= self._limit:
            return
        # Those that run are as many as the scheduler runs; among the others the oldest goes.
        known = self._known.items()
        idle = (key for key, one in known if one.dp_rank is None or one.ended is not None or one.handed_off)
        oldest = next(idle, None)
        if oldest is not None:
            del self._known[oldest]
