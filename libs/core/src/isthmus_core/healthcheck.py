"""`python -m isthmus_core.healthcheck HOST:PORT [--config FILE] [--set section.key=value]...`

For container health checks: exit code 0 when grpc.health.v1 at HOST:PORT answers SERVING within the time, 1 when it
does not, 2 for wrong settings. The certificates are those of the configuration's `tls` section.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from isthmus_core.config import load_config
from isthmus_core.errors import ConfigError
from isthmus_core.rpc import wait_serving


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m isthmus_core.healthcheck", description="Is the gRPC service at an address serving?"
    )
    parser.add_argument("target", metavar="HOST:PORT", help="gRPC address of a coordinator, router or worker")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default: 3")
    parser.add_argument("--config", type=Path, default=None, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE", help="change one key"
    )
    arguments = parser.parse_args(argv)
    try:
        tls = load_config(arguments.config, arguments.overrides).tls
        serving = asyncio.run(wait_serving(arguments.target, arguments.timeout, tls=tls))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if not serving:
        print(f"{arguments.target} does not serve", file=sys.stderr)
    return 0 if serving else 1


if __name__ == "__main__":
    sys.exit(main())
