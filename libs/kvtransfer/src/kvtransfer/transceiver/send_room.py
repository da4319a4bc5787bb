"""Room of one peer in a send arena: at once for a gather that does not wait, or when there is some."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvtransfer.bounce.credits import Credits
    from kvtransfer.bounce_ports import ChunkName
    from kvtransfer.transceiver.bounced_write import BouncedWrite
    from kvtransfer.transceiver.rank_state import PeerId


class SendRoom:
    """`writes`: to whom grants and room of a name belong, from the first question on."""

    def __init__(self, arena: Credits[PeerId, ChunkName], peer: PeerId, writes: dict[ChunkName, BouncedWrite]) -> None:
        self._arena, self._peer, self._writes = arena, peer, writes

    def now(self, write: BouncedWrite, name: ChunkName, nbytes: int) -> int | None:
        """Offset of room for a chunk of which the peer has not been asked yet; None when there is none to spare."""
        self._writes[name] = write
        given = self._arena.take_now(self._peer, name, nbytes)
        return None if given is None else given.offset

    def keep(self, name: ChunkName) -> None:
        """The peer has granted it: nothing else is waited for."""
        self._arena.keep(name)

    def ask(self, name: ChunkName, nbytes: int) -> None:
        """Room for a chunk that has been granted, answered by `BouncedWrite.place`."""
        self._arena.ask(self._peer, name, nbytes)

    def free(self, name: ChunkName) -> None:
        """The chunk is not needed any more, or not waited for."""
        self._arena.drop(name)
        self._arena.give_back(name)
