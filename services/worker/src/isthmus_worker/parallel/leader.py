"""The first rank: its own part of the model, and the same step for all others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from isthmus_core.errors import ConfigError, StartError
from isthmus_worker.parallel.frames import Begin, Copy, Loaded, Step, Zero
from isthmus_worker.runner import ModelRunner, NonFiniteLogits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from isthmus_core.config_parallel import ParallelConfig
    from isthmus_worker.parallel.links import RankLinks
    from isthmus_worker.runner import BatchRow, Drawn, ModelDescription
    from kvtransfer.page_table import PageTable


class RankRunner(ModelRunner, Protocol):
    """A part of a model. All ranks get the same rows; rank 0 draws the tokens.

    `device`: where it computes. `digests`: of the tensors that this rank has hashed. `open_meeting` on rank 0 returns a
    port; then every rank calls `meet`, which returns when all have come.
    """

    device: str
    digests: dict[str, bytes]

    def warm_up_rows(self) -> list[list[BatchRow]]: ...

    def open_meeting(self, ranks: int) -> int: ...

    def meet(self, port: int, backend: str, timeout_s: float) -> None: ...

    def zero_cache(self) -> None: ...


class LeaderRunner:
    """Implements `isthmus_worker.runner.ModelRunner` over all ranks. Raises RankLost when one of them is gone.

    A method returns when every rank has done its part: what a step has written is in the memory of all of them. Waits
    for the ranks to load; raises StartError when they have not loaded the same model in the same way.
    """

    def __init__(
        self, own: RankRunner, links: RankLinks, parallel: ParallelConfig, merge: Merge, room: Sequence[int]
    ) -> None:
        self._own, self._links, self._parallel = own, links, parallel
        self._steps = 0
        others = links.loaded()
        check_alike(own.describe(), others)
        digests = dict(own.digests)
        for one in others:
            digests.update(one.digests)
        self._description = replace(own.describe(), weights_digest=merge(digests))
        self.num_blocks = tuple(min(counts) for counts in zip(room, *(one.num_blocks for one in others), strict=True))
        self.backend = choose_backend(parallel.backend, [own.device, *(one.device for one in others)])

    def describe(self) -> ModelDescription:
        """Of the whole model; sizes of blocks are those of this rank."""
        return self._description

    def allocate_cache(self, *num_blocks: int) -> PageTable:
        """On every rank, after they have met. Returns this rank's page table."""
        port = self._own.open_meeting(self._parallel.world_size)
        self._links.tell(Begin(port, self.backend, num_blocks))
        self._own.meet(port, self.backend, self._parallel.step_timeout_s)
        return self._own.allocate_cache(*num_blocks)

    def block_lists(self, rank: int = 0) -> tuple[int, ...]:
        """See ModelRunner."""
        return self._own.block_lists(rank)

    def warm_up(self) -> None:
        """First use of every kernel on every rank."""
        for rows in self._own.warm_up_rows():
            self.execute(rows)
        self._links.tell(Zero())
        self._own.zero_cache()
        self._links.confirm()

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        """One step of all ranks."""
        if not rows:
            return []
        self._steps += 1
        self._links.tell(Step(self._steps, rows))
        try:
            drawn = self._own.execute(rows)
        except NonFiniteLogits:
            self._links.confirm()
            raise
        self._links.confirm()
        return drawn

    def copy_blocks(self, src: NDArray[np.int32], dst: NDArray[np.int32], number: int = 0, dp_rank: int = 0) -> None:
        """Blocks `src` to blocks `dst` of a block list of group `dp_rank`, whole, on all its ranks."""
        self._links.tell(Copy(dp_rank, number, src, dst))
        self._own.copy_blocks(src, dst, number, dp_rank)
        self._links.confirm()


class Merge(Protocol):
    """From the digests of all tensors to that of the model."""

    def __call__(self, digests: dict[str, bytes], /) -> bytes: ...


def check_alike(own: ModelDescription, others: Sequence[Loaded]) -> None:
    """Raises StartError naming every rank that computes something else than rank 0, with both values."""
    wrong: list[str] = []
    for one in others:
        if one.kv_dtype != own.kv_dtype:
            wrong.append(f"rank {one.rank} has dtype {one.kv_dtype}, rank 0 has {own.kv_dtype}")
        if one.attention_digest != own.attention_digest:
            wrong.append(
                f"rank {one.rank} has attention {one.attention_digest.hex()}, rank 0 has {own.attention_digest.hex()}"
            )
    if wrong:
        raise StartError(f"the ranks do not hold one model: {'; '.join(wrong)}; give all of them the same model.path")


def choose_backend(asked: str, devices: Sequence[str]) -> str:
    """Of torch.distributed. Raises ConfigError when the devices do not allow what is asked."""
    separate = all(one.startswith("cuda") for one in devices) and len(set(devices)) == len(devices)
    if asked == "nccl" and not separate:
        raise ConfigError(
            f"parallel.backend = nccl needs a CUDA device for each rank, they have {', '.join(devices)}; write gloo"
        )
    return ("nccl" if separate else "gloo") if asked == "auto" else asked
