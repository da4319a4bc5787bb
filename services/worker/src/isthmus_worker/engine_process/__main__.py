"""Start of an engine process. Its parent is the hub; it never outlives it.

Exit codes: 0 the hub said stop or is gone, 1 a crash, 2 wrong settings, 3 could not start, 4 the transfer agent failed.
The last line on stderr says why.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus_core.config import IsthmusConfig, load_config
from isthmus_core.errors import ConfigError, IsthmusError, StartError
from isthmus_core.framing import FrameError, FrameSocket
from isthmus_core.logs import setup_logging
from isthmus_core.process import die_with_parent, leave
from isthmus_worker.engine_process.build import build_scheduler, describe_engine, handoff_policy, load_model
from isthmus_worker.engine_process.inbox import Inbox
from isthmus_worker.engine_process.loop import EngineLoop
from isthmus_worker.engine_process.outbox import Outbox
from isthmus_worker.engine_process.rank import RankRole
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "isthmus_worker.engine_process"
# The transfer agent's thread shares the interpreter with the loop: it must not wait 5 ms for its turn.
_SWITCH_INTERVAL_S = 5e-4
_AGENT_STOP_S = 2.0

logger = logging.getLogger(__name__)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The engine of a worker; started by its hub.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument("--scheduler-fd", type=int, required=True, metavar="N", help="socket: engine_ipc.proto")
    parser.add_argument("--rank-fd", type=int, metavar="N", help="socket: second part of transfer_ipc.proto")
    parser.add_argument("--lock-fd", type=int, metavar="N", help="instance lock, held as long as this process lives")
    return parser.parse_args(argv)


def _keep_to_ourselves(arguments: argparse.Namespace) -> None:
    """No process that a library starts may hold the sockets, or the lock that proves this process alive."""
    for option in ("scheduler_fd", "rank_fd", "lock_fd"):
        fd: int | None = getattr(arguments, option)
        if fd is None:
            continue
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            raise ConfigError(f"--{option.replace('_', '-')} {fd}: {error.strerror}") from error


def _serve(config: IsthmusConfig, arguments: argparse.Namespace) -> None:
    """Everything between the arguments and the exit code."""
    hands_off = config.worker.role != "context_and_generation"
    if hands_off and arguments.rank_fd is None:
        raise ConfigError(f"worker.role = {config.worker.role} hands caches off and needs --rank-fd")
    frames = FrameSocket.from_fd(arguments.scheduler_fd)
    model = load_model(config)
    # After the model: the agent follows the CUDA version of a torch that is loaded.
    rank = None if arguments.rank_fd is None else RankRole(config, arguments.rank_fd, model.page_table)
    outbox, inbox = Outbox(frames), Inbox(frames)
    policy = handoff_policy(config, model.num_blocks)
    transceiver = SchedulerTransceiver(outbox, policy=policy) if hands_off else None
    scheduler = build_scheduler(config, model, outbox, transceiver)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    outbox.emit(describe_engine(config, model))
    inbox.start()
    EngineLoop(scheduler, model.runner, inbox, outbox, transceiver).run()
    if rank is not None:
        rank.stop(_AGENT_STOP_S)


def run(argv: Sequence[str] | None = None) -> int:
    """Serve until the hub says stop or is gone; returns the exit code."""
    arguments = _parse(argv)
    die_with_parent()
    # Signals to the whole process group are the hub's to answer: it drains, and then says stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        _keep_to_ourselves(arguments)
        config = load_config(arguments.config)
        setup_logging(config.logging, "worker", f"{config.worker.instance_id or config.worker.role}/engine")
        _serve(config, arguments)
    except (ConfigError, StartError) as error:
        return _fail(error, error.exit_code)
    except (IsthmusError, FrameError) as error:
        return _fail(error, 1)
    except Exception as error:  # the process ends: the trace goes to the log, the reason to the hub
        logger.exception("the engine crashed")
        return _fail(error, 1)
    return 0


def _fail(error: Exception, code: int) -> int:
    """One line, the last one, with nothing but the reason: the hub reports it as it is."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    kind = "" if isinstance(error, ConfigError | StartError | IsthmusError) else f"{type(error).__name__}: "
    print(f"{kind}{text or type(error).__name__}", file=sys.stderr)
    return code


if __name__ == "__main__":
    leave(run())
