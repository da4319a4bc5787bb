"""Every rank but the first: does what the steps say, in order, until the first rank is gone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from isthmus_core.errors import InternalError
from isthmus_worker.parallel.frames import (
    Begin,
    Copy,
    Done,
    Loaded,
    Step,
    Zero,
    answer_to_bytes,
    command_from_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from isthmus_core.framing import FrameSocket
    from isthmus_worker.parallel.leader import RankRunner
    from kvtransfer.page_table import PageTable

logger = logging.getLogger(__name__)


class Follower:
    """`on_cache(page_table)` is called once the cache is allocated. `step_timeout_s`: how long another rank may keep
    this one waiting in a step."""

    def __init__(
        self,
        runner: RankRunner,
        frames: FrameSocket,
        step_timeout_s: float,
        on_cache: Callable[[PageTable], None],
    ) -> None:
        self._runner, self._frames = runner, frames
        self._step_timeout_s, self._on_cache = step_timeout_s, on_cache
        self._steps = 0

    def announce(self, rank: int, num_blocks: tuple[int, ...]) -> None:
        """This rank has loaded its part, and has room for so many blocks of each list."""
        about = self._runner.describe()
        loaded = Loaded(
            rank, about.kv_dtype, about.attention_digest, self._runner.digests, num_blocks, self._runner.device
        )
        self._frames.send(answer_to_bytes(loaded))

    def run(self) -> None:
        """Returns when the first rank has closed its end. Raises RankLost, FrameError, or what the model raises."""
        while (frame := self._frames.recv()) is not None:
            command = command_from_bytes(frame)
            if isinstance(command, Begin):
                self._runner.meet(command.port, command.backend, self._step_timeout_s)
                self._on_cache(self._runner.allocate_cache(*command.num_blocks))
                continue
            match command:
                case Step(number, rows):
                    if number != self._steps + 1:
                        raise InternalError(f"step {number} follows step {self._steps}")
                    self._steps = number
                    self._runner.execute(rows)
                case Copy(dp_rank, number, sources, destinations):
                    self._runner.copy_blocks(sources, destinations, number, dp_rank)
                case Zero():
                    self._runner.zero_cache()
            try:
                self._frames.send(answer_to_bytes(Done()))
            except ConnectionError:
                break
        logger.info("leaving: the first rank is gone")
