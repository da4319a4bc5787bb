"""Start of the front process. Its parent is the hub; it never outlives it.

    python -m isthmus_worker.vllm_engine --config FILE --scheduler-fd N [--lock-fd K]

Exit codes: 0 the hub said stop or is gone, 1 a crash, 2 wrong settings, 3 could not start. The last line says why.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus_core.config import load_config
from isthmus_core.errors import ConfigError, IsthmusError, StartError
from isthmus_core.logs import setup_logging
from isthmus_core.process import die_with_parent, leave
from kvtransfer.integrations.vllm.refusals import EngineUnsupported, check_version

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "isthmus_worker.vllm_engine"

logger = logging.getLogger(__name__)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="vLLM as the engine of a worker; started by its hub.")
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument("--scheduler-fd", type=int, required=True, metavar="N", help="socket: engine_ipc.proto")
    parser.add_argument("--lock-fd", type=int, metavar="N", help="instance lock, held as long as this process lives")
    return parser.parse_args(argv)


def run(argv: Sequence[str] | None = None) -> int:
    """Serve until the hub says stop or is gone; returns the exit code."""
    arguments = _parse(argv)
    die_with_parent()
    # Signals to the whole process group are the hub's to answer: it drains, and then says stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        for fd in (arguments.scheduler_fd, arguments.lock_fd):
            if fd is not None:
                os.set_inheritable(fd, False)
        config = load_config(arguments.config)
        setup_logging(config.logging, "worker", f"{config.worker.instance_id or config.worker.role}/vllm")
        check_version()
        from isthmus_worker.vllm_engine.front import serve
        from isthmus_worker.vllm_engine.model import identify

        asyncio.run(serve(config, identify(config), arguments.scheduler_fd))
    except (ConfigError, StartError) as error:
        return _fail(error, error.exit_code)
    except EngineUnsupported as error:
        return _fail(error, StartError.exit_code)
    except Exception as error:  # the process ends: the trace goes to the log, the reason to the hub
        logger.exception("the front of vLLM crashed")
        return _fail(error, 1)
    return 0


def _fail(error: Exception, code: int) -> int:
    """One line, the last one, with nothing but the reason: the hub reports it as it is."""
    text = "; ".join(line.strip() for line in str(error).splitlines() if line.strip())
    kind = "" if isinstance(error, IsthmusError | EngineUnsupported) else f"{type(error).__name__}: "
    print(f"{kind}{text or type(error).__name__}", file=sys.stderr)
    return code


if __name__ == "__main__":
    leave(run())
