"""The first rank's sockets to the others: every command goes to all of them, and all of them confirm it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError
from isthmus_worker.parallel.frames import Answer, Command, Done, Loaded, answer_from_bytes, command_to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus_core.framing import FrameSocket


# Exit code of a rank that ends because another one did.
RANK_LOST = 5


class RankLost(InternalError):
    """Another rank of this instance is gone, or keeps this one waiting: the reason is that rank's to tell."""


class RankLinks:
    """`sockets[i]` leads to rank i + 1. Raises RankLost when the rank at the other end is gone."""

    def __init__(self, sockets: Sequence[FrameSocket]) -> None:
        self._sockets = list(sockets)

    def loaded(self) -> list[Loaded]:
        """Waits for the first answer of every rank, in flat order."""
        found: list[Loaded] = []
        for rank, answer in enumerate(self._answers(), 1):
            if not isinstance(answer, Loaded) or answer.rank != rank:
                raise InternalError(f"rank {rank} did not begin with what it has loaded")
            found.append(answer)
        return found

    def tell(self, command: Command) -> None:
        """To all ranks, without waiting for them."""
        frame = command_to_bytes(command)
        for rank, sock in enumerate(self._sockets, 1):
            try:
                sock.send(frame)
            except ConnectionError as error:
                raise RankLost(f"rank {rank} is gone") from error

    def confirm(self) -> None:
        """Waits until every rank has carried out the last command: what it wrote is in memory."""
        for rank, answer in enumerate(self._answers(), 1):
            if not isinstance(answer, Done):
                raise InternalError(f"rank {rank} answered a command with {type(answer).__name__}")

    def _answers(self) -> list[Answer]:
        found: list[Answer] = []
        for rank, sock in enumerate(self._sockets, 1):
            frame = sock.recv()
            if frame is None:
                raise RankLost(f"rank {rank} is gone")
            found.append(answer_from_bytes(frame))
        return found
