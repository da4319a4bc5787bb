"""All ranks of an instance as threads of one process: the model's part of parallelism without processes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from isthmus_core.config_parallel import ParallelConfig
from isthmus_worker.runner import BatchRow, Drawn
from isthmus_worker.torch_engine.runner import TorchRunner

_PATIENCE_S = 30.0


class _Meeting:
    """Where the ranks of one stage add up."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.parts: list[Any] = [None] * size


class ThreadRank:
    """Implements `Collectives` for one thread."""

    def __init__(self, rank: int, parallel: ParallelConfig, stages: list[_Meeting], mail: dict[Any, Any]) -> None:
        self._rank, self._tp, self._world = rank, parallel.tensor_parallel_size, parallel.world_size
        self._stage, self._mail = stages[rank // self._tp], mail

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        if self._tp == 1:
            return x
        self._stage.parts[self._rank % self._tp] = x.clone()
        self._stage.barrier.wait(_PATIENCE_S)
        total = self._stage.parts[0].clone()
        for part in self._stage.parts[1:]:
            total += part
        self._stage.barrier.wait(_PATIENCE_S)
        return x.copy_(total)

    def send_on(self, hidden: torch.Tensor) -> None:
        self._mail[self._rank, self._rank + self._tp].put(hidden.clone())

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._mail[self._rank - self._tp, self._rank].get(timeout=_PATIENCE_S)

    def to_leader(self, part: torch.Tensor | None, rows: int) -> torch.Tensor | None:
        if self._rank:
            if part is not None:
                self._mail[self._rank, 0].put(part.clone())
            return None
        first = max(self._world - self._tp, 1)
        parts = [self._mail[rank, 0].get(timeout=_PATIENCE_S) for rank in range(first, self._world)]
        return torch.cat(parts if part is None else [part, *parts], -1)


class ThreadInstance:
    """`execute` runs one step on every rank and returns what rank 0 drew. `runners` are in flat order."""

    def __init__(self, folder: Path, num_blocks: int = 32, *, options: dict[str, Any] | None = None, **parallel: Any):
        config = ParallelConfig(**parallel)
        ranks = range(config.world_size)
        self.runners = [TorchRunner(folder, parallel=config, rank=rank, **(options or {})) for rank in ranks]
        stages = [_Meeting(config.tensor_parallel_size) for _ in range(config.pipeline_parallel_size)]
        mail: dict[Any, Any] = {(a, b): SimpleQueue() for a in ranks for b in ranks}
        self.tables = [runner.allocate_cache(num_blocks) for runner in self.runners]
        for rank, runner in enumerate(self.runners):
            runner.connect(ThreadRank(rank, config, stages, mail))
        self._threads = ThreadPoolExecutor(config.world_size)

    def execute(self, rows: list[BatchRow]) -> list[tuple[Drawn, ...]]:
        futures = [self._threads.submit(runner.execute, rows) for runner in self.runners]
        found = [future.result(60) for future in futures]
        return found[0]

    def close(self) -> None:
        self._threads.shutdown()
