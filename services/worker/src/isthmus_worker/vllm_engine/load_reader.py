"""What vLLM counts in every step, as it hands it to loggers."""

# pyright: basic, reportMissingImports=false
# ^ vLLM lives in an environment of its own.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def load_reader(note: Callable[[Any], None]) -> type:
    """A logger of vLLM that hands every step's SchedulerStats to `note`."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadReader(StatLoggerBase):
        """Of one engine."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """Nothing to keep."""

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            if scheduler_stats is not None:
                note(scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Nothing to say."""

    return LoadReader
