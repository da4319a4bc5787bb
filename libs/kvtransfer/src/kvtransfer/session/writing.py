"""The writers of attempts on the context side: orders out, their answers collected, one last word each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.ports import CancelWrite, TransferNotice, WriterOutcome
from kvtransfer.session.actions import Emit, PeerId, ToPeer, ToRank
from kvtransfer.session.transmit_attempt import Attempt, Progress, TransmitState, Writer, last_word, never, write_orders
from kvtransfer.tracing import begin_transfer, end_transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from isthmus_core.tracing import Tracing
    from kvtransfer.messages import KvRequest
    from kvtransfer.ports import SendOffer


class Writing:
    """Decides nothing about the state of an attempt. `emit` must not call back."""

    def __init__(self, emit: Emit, tracing: Tracing) -> None:
        self._emit, self._tracing = emit, tracing

    def begin(self, attempt: Attempt, peer: PeerId, request: KvRequest, writers: Sequence[Writer]) -> None:
        """Orders every chunk that is there."""
        attempt.peer, attempt.asked = peer, request
        attempt.writers = {writer: Progress() for writer in writers}
        for writer in writers:
            attempt.spans[writer] = begin_transfer(self._tracing, request.trace, request.key, peer, writer)
        for chunk in attempt.chunks:
            self.order(attempt, chunk)

    def order(self, attempt: Attempt, chunk: SendOffer) -> None:
        """Orders one chunk of an attempt that somebody has asked for."""
        if attempt.peer is None or attempt.asked is None:
            return
        for rank, order in write_orders(chunk, attempt.peer, attempt.asked, tuple(attempt.writers)):
            for writer, progress in attempt.writers.items():
                progress.open += writer[0] == rank
            self._emit(ToRank(rank, order))

    def cancel(self, attempt: Attempt) -> None:
        """Ranks do not start what they have not posted."""
        for rank in dict.fromkeys(src for src, _ in attempt.missing):
            self._emit(ToRank(rank, CancelWrite(attempt.key, attempt.receive)))

    def conclude(self, attempt: Attempt) -> None:
        """Writers without open orders are over when none will follow."""
        if attempt.more and attempt.state is not TransmitState.CANCELLING:
            return
        for writer in attempt.missing:
            progress = attempt.writers[writer]
            if progress.open == 0:
                if not progress.parts and attempt.state is TransmitState.WRITING:
                    # No chunk held anything that was asked for: there was nothing to deliver.
                    progress.parts.append(TransferNotice(attempt.key, *writer, WriterOutcome.DELIVERED))
                parts = progress.parts
                if attempt.cut_short:
                    parts = [*parts, never(attempt.key, writer, "cancelled before everything was ordered")]
                self.over(attempt, writer, parts)

    def over(self, attempt: Attempt, writer: Writer, parts: Sequence[TransferNotice]) -> None:
        """Says a writer's last word."""
        notice = last_word(attempt.key, attempt.receive, writer, parts)
        attempt.writers[writer].final = notice
        end_transfer(attempt.spans.pop(writer), notice)
        if attempt.peer is not None:
            self._emit(ToPeer(attempt.peer, notice))

    def say(self, peer: PeerId, notices: Iterable[TransferNotice]) -> None:
        """What is known already."""
        for notice in notices:
            self._emit(ToPeer(peer, notice))
