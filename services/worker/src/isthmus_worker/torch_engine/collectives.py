"""What the ranks of one instance tell each other in a step: sums, hidden states to the next stage, logits to rank 0."""

from __future__ import annotations

from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from isthmus_core.errors import InternalError
from isthmus_worker.parallel.links import RankLost

if TYPE_CHECKING:
    from collections.abc import Generator

    from torch import Tensor

    from kvtransfer.rank_info import Topology


# Where the ranks of an instance meet.
Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]  # it is documented as public


class Collectives(Protocol):
    """All ranks make the same calls in the same order."""

    def sum_(self, x: Tensor) -> Tensor:
        """x summed over the ranks of the stage, in place where possible."""
        ...

    def send_on(self, hidden: Tensor) -> None:
        """To the same rank of the next stage."""
        ...

    def receive(self, hidden: Tensor) -> Tensor:
        """From the same rank of the stage before, into `hidden`."""
        ...

    def to_leader(self, part: Tensor | None, rows: int) -> Tensor | None:
        """Columns of the logits from the ranks of the last stage, [rows, vocabulary padded]; None but on rank 0."""
        ...


class Alone:
    """An instance of one rank."""

    def sum_(self, x: Tensor) -> Tensor:
        """There is nothing to add."""
        return x

    def send_on(self, hidden: Tensor) -> None:
        """Raises InternalError: there is one stage."""
        raise InternalError("a single rank has no next stage")

    def receive(self, hidden: Tensor) -> Tensor:
        """Raises InternalError: there is one stage."""
        raise InternalError("a single rank has no stage before it")

    def to_leader(self, part: Tensor | None, rows: int) -> Tensor | None:
        """They are here."""
        return part


class Ranks:
    """Over torch.distributed. `store` is where the ranks meet; all of them have to come.

    `columns`: what each rank of the last stage has of the logits. gloo does not move CUDA tensors between ranks: those
    go by way of the host. Raises RankLost, as every method does.
    """

    def __init__(
        self,
        store: Store,
        backend: str,
        topology: Topology,
        timeout_s: float,
        device: torch.device,
        dtype: torch.dtype,
        columns: int,
    ) -> None:
        self._topology, self._rank, self._columns = topology, topology.flat_rank, columns
        self._device, self._dtype = device, dtype
        self._by_host = backend == "gloo" and device.type == "cuda"
        tp, world = topology.tp_size, topology.world_size
        with _others():
            timeout = timedelta(seconds=timeout_s)
            dist.init_process_group(
                backend,
                store=store,
                rank=self._rank,
                world_size=world,
                timeout=timeout,
                device_id=device if backend == "nccl" else None,
            )
            stages = [dist.new_group(range(first, first + tp), timeout) for first in range(0, world, tp)]
        self._stage = stages[topology.pp_rank]

    def sum_(self, x: Tensor) -> Tensor:
        """See Collectives."""
        if self._topology.tp_size == 1:
            return x
        there = self._there(x)
        with _others():
            dist.all_reduce(there, group=self._stage)
        return self._here(there)

    def send_on(self, hidden: Tensor) -> None:
        """See Collectives."""
        self._send(hidden, self._rank + self._topology.tp_size)

    def receive(self, hidden: Tensor) -> Tensor:
        """See Collectives."""
        return self._receive(hidden, self._rank - self._topology.tp_size)

    def to_leader(self, part: Tensor | None, rows: int) -> Tensor | None:
        """See Collectives."""
        topology = self._topology
        first = topology.world_size - topology.tp_size
        if self._rank:
            if part is not None:
                self._send(part, 0)
            return None
        parts = [
            self._receive(torch.empty(rows, self._columns, dtype=self._dtype, device=self._device), rank)
            for rank in range(max(first, 1), topology.world_size)
        ]
        return torch.cat(parts if part is None else [part, *parts], -1)

    def _send(self, x: Tensor, rank: int) -> None:
        with _others():
            dist.send(self._there(x), rank)

    def _receive(self, into: Tensor, rank: int) -> Tensor:
        there = torch.empty_like(into, device="cpu") if self._by_host else into
        with _others():
            dist.recv(there, rank)
        return self._here(there)

    def _there(self, x: Tensor) -> Tensor:
        return x.contiguous().cpu() if self._by_host else x.contiguous()

    def _here(self, x: Tensor) -> Tensor:
        return x.to(self._device) if self._by_host else x


def open_store(port: int, ranks: int) -> Store:
    """Where the ranks of an instance meet, on the loopback interface. Port 0 opens one on a free port, for the others
    to join. Raises RankLost."""
    with _others():
        return Store("127.0.0.1", port, ranks, is_master=port == 0, wait_for_workers=False)


@contextmanager
def _others() -> Generator[None]:
    """What torch.distributed raises is about another rank."""
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"another rank of this instance is gone or silent: {error}") from error
