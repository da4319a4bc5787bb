"""Start of an engine process. Its parent is the hub; it never outlives it.

The first rank of an instance has the scheduler; the others do what its steps say.

Exit codes: 0 the hub said stop or is gone, 1 a crash, 2 wrong settings, 3 could not start, 4 the transfer agent failed,
5 another rank of the instance is gone.
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
from isthmus_core.process import die_with_parent, leave, settle_heap
from isthmus_worker.engine_process.build import build_front, describe_engine
from isthmus_worker.engine_process.inbox import Inbox
from isthmus_worker.engine_process.load import load_model, load_rank
from isthmus_worker.engine_process.loop import EngineLoop
from isthmus_worker.engine_process.outbox import Outbox
from isthmus_worker.engine_process.rank import RankRole
from isthmus_worker.parallel.links import RANK_LOST, RankLost
from kvtransfer.transceiver.layer_progress import LayerProgress

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.page_table import PageTable

PROGRAM = "isthmus_worker.engine_process"
# The transfer agent's thread shares the interpreter with the loop: it must not wait 5 ms for its turn.
_SWITCH_INTERVAL_S = 5e-4
_AGENT_STOP_S = 2.0

logger = logging.getLogger(__name__)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The engine of a worker; started by its hub.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="flat rank, see the section parallel")
    parser.add_argument("--scheduler-fd", type=int, metavar="N", help="socket: engine_ipc.proto; rank 0 only")
    parser.add_argument(
        "--step-fd",
        type=int,
        action="append",
        default=[],
        metavar="N",
        help="socket: rank_ipc.proto; on rank 0 one for each other rank, in order",
    )
    parser.add_argument("--rank-fd", type=int, metavar="N", help="socket: second part of transfer_ipc.proto")
    parser.add_argument("--lock-fd", type=int, metavar="N", help="instance lock, held as long as this process lives")
    return parser.parse_args(argv)


def _keep_to_ourselves(arguments: argparse.Namespace) -> None:
    """No process that a library starts may hold the sockets, or the lock that proves this process alive."""
    given: list[tuple[str, int | None]] = [("step-fd", fd) for fd in arguments.step_fd]
    given += [(name, getattr(arguments, name.replace("-", "_"))) for name in ("scheduler-fd", "rank-fd", "lock-fd")]
    for name, fd in given:
        if fd is None:
            continue
        try:
            os.set_inheritable(fd, False)
        except OSError as error:
            raise ConfigError(f"--{name} {fd}: {error.strerror}") from error


def _serve(config: IsthmusConfig, arguments: argparse.Namespace) -> None:
    """Everything between the arguments and the exit code."""
    hands_off, rank, world = config.worker.role != "context_and_generation", arguments.rank, config.parallel.world_size
    if hands_off and arguments.rank_fd is None:
        raise ConfigError(f"worker.role = {config.worker.role} hands caches off and needs --rank-fd")
    if not 0 <= rank < world:
        raise ConfigError(f"--rank {rank}: the instance has {world} ranks")
    if len(arguments.step_fd) != (1 if rank else world - 1):
        raise ConfigError(f"--step-fd: {len(arguments.step_fd)} given, rank {rank} of {world} needs {world - 1 or 1}")
    steps = [FrameSocket.from_fd(fd) for fd in arguments.step_fd]
    if rank:
        _follow(config, rank, steps[0], arguments.rank_fd)
    elif arguments.scheduler_fd is None:
        raise ConfigError("--scheduler-fd is missing")
    else:
        _lead(config, FrameSocket.from_fd(arguments.scheduler_fd), steps, arguments.rank_fd)


def _lead(config: IsthmusConfig, frames: FrameSocket, others: list[FrameSocket], rank_fd: int | None) -> None:
    """The first rank, or the only one."""
    layers = LayerProgress() if config.transfer.layer_wise else None
    model = load_model(config, others, layers)
    # After the model: the agent follows the CUDA version of a torch that is loaded.
    role = None if rank_fd is None else RankRole(config, rank_fd, model.page_table, layers=layers)
    outbox, inbox = Outbox(frames), Inbox(frames)
    front = build_front(config, model, outbox, layers)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    outbox.emit(describe_engine(config, model))
    inbox.start()
    settle_heap()
    EngineLoop(front, model.runner, inbox, outbox, speaks_early=layers is not None).run()
    if role is not None:
        role.stop(_AGENT_STOP_S)


def _follow(config: IsthmusConfig, rank: int, frames: FrameSocket, rank_fd: int | None) -> None:
    """Any other rank."""
    roles: list[RankRole] = []
    layers = LayerProgress() if config.transfer.layer_wise else None

    def cache_is_there(page_table: PageTable) -> None:
        if rank_fd is not None:
            roles.append(RankRole(config, rank_fd, page_table, rank, layers))
        sys.setswitchinterval(_SWITCH_INTERVAL_S)

    load_rank(config, rank, frames, cache_is_there, layers).run()
    for role in roles:
        role.stop(_AGENT_STOP_S)


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
        name = "engine" if arguments.rank == 0 else f"rank-{arguments.rank}"
        setup_logging(config.logging, "worker", f"{config.worker.instance_id or config.worker.role}/{name}")
        _serve(config, arguments)
    except (ConfigError, StartError) as error:
        return _fail(error, error.exit_code)
    except RankLost as error:
        return _fail(error, RANK_LOST)
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
