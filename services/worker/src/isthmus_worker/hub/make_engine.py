"""Which engine a worker gets, and how its process is started."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from isthmus_core.errors import ConfigError
from isthmus_worker.process_engine import EngineLaunch, ProcessEngine
from kvtransfer.config import OnFailure

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.settings import WorkerSettings
    from kvtransfer.ports import Holder


def make_engine(
    config: IsthmusConfig,
    settings: WorkerSettings,
    here: Holder,
    environment: dict[str, str],
    lock_fd: int,
    **callbacks: Any,
) -> ProcessEngine:
    """Not started yet; `callbacks` as ProcessEngine takes them. Raises ConfigError for what the engine can not do."""
    worker = config.worker.model_copy(update={"instance_id": here.instance_id})
    launch = EngineLaunch(
        config=config.model_copy(update={"worker": worker}),
        environment=environment,
        with_rank=settings.transfer is not None,
        start_timeout_s=settings.engine_start_timeout_s,
        lock_fd=lock_fd,
    )
    if config.engine.kind != "vllm":
        return ProcessEngine(launch, here.instance_id, **callbacks)
    from isthmus_worker.vllm_engine.engine import VllmEngine
    from kvtransfer.local.messages import LocalWelcome

    if launch.ranks != 1:
        raise ConfigError(
            f"parallel: {launch.ranks} ranks; with engine.kind = vllm write engine.vllm.tensor_parallel_size and "
            "engine.vllm.pipeline_parallel_size instead"
        )
    python = sys.executable if config.engine.python is None else str(config.engine.python)
    launch = replace(
        launch,
        # What Python says about shared memory of killed processes would be taken for the reason of their end.
        environment={"PYTHONWARNINGS": "ignore:resource_tracker:UserWarning", **environment},
        with_rank=False,
        command=(python, "-m", "isthmus_worker.vllm_engine"),
    )
    transfer = settings.transfer
    welcome = None
    if transfer is not None:
        welcome = LocalWelcome(
            here,
            settings.role,
            transfer.backend,
            transfer.max_held_requests,
            transfer.max_held_share,
            transfer.on_failure is OnFailure.RECOMPUTE,
            config.transfer.probe_on_connect and config.worker.role == "context",
            config.transfer.require_path or "",
            transfer.max_peers,
        )
    return VllmEngine(launch, here.instance_id, welcome, **callbacks)
