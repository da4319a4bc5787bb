"""python -m kvtransfer.sidecar --role context|generation --listen HOST:PORT [OPTIONS] -- COMMAND OF THE ENGINE

Exit codes: that of the command; 2 wrong options, 3 could not start.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from isthmus_core.config import LoggingConfig, TelemetryConfig, TlsConfig
from isthmus_core.errors import ConfigError, StartError
from isthmus_core.logs import setup_logging
from isthmus_core.process import leave, split_address
from isthmus_core.tracing import Tracing
from kvtransfer.agents import known_agents
from kvtransfer.config import OnFailure, TransferConfig
from kvtransfer.errors import AgentUnavailable, TransferConfigError
from kvtransfer.rank_info import InstanceRole
from kvtransfer.sidecar.hub import Sidecar, SidecarSettings, environment_for

PROGRAM = "kvtransfer.sidecar"
_ROLES = {"context": InstanceRole.CONTEXT, "generation": InstanceRole.GENERATION}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The hub of an engine, and the engine as its child.")
    parser.add_argument("--role", required=True, choices=sorted(_ROLES), help="prefill is context, decode generation")
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="gRPC server for the hubs of peers")
    parser.add_argument("--advertise", metavar="HOST:PORT", help="how peers reach it; default: --listen")
    parser.add_argument("--instance-id", metavar="NAME", help="default: role and port; the same at every start")
    parser.add_argument("--backend", default="nixl", choices=known_agents(), help="transfer agent (default: nixl)")
    parser.add_argument("--timeout", type=float, default=30.0, metavar="S", help="a decode waits this long for a cache")
    parser.add_argument("--hold", type=float, default=30.0, metavar="S", help="a prefill holds its pages this long")
    parser.add_argument("--on-failure", default="recompute", choices=[one.value for one in OnFailure])
    parser.add_argument("--probe", action="store_true", help="measure the way to a peer before it is used")
    parser.add_argument("--require-path", default="", metavar="WORDS", help="refuse peers on another way, see Probe")
    parser.add_argument("--state-dir", type=Path, default=Path("/tmp/isthmus"), help="host-local folder of locks")
    parser.add_argument("--otlp", metavar="URL", help="OTLP/gRPC receiver of traces")
    for name in ("ca", "cert", "key"):
        parser.add_argument(f"--tls-{name}", type=Path, metavar="FILE", help="PEM; all three or none")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the engine")
    return parser


def _settings(options: argparse.Namespace) -> SidecarSettings:
    host, port = split_address(options.listen, "--listen")
    if options.advertise is None and host in ("0.0.0.0", "::"):
        raise ConfigError(f"--listen {options.listen} is no address that others can call: give --advertise HOST:PORT")
    given = (options.tls_ca, options.tls_cert, options.tls_key)
    if any(given) and not all(given):
        raise ConfigError("give --tls-ca, --tls-cert and --tls-key, or none of them")
    try:
        transfer = TransferConfig(
            options.backend,
            timeout_s=options.timeout,
            handoff_hold_s=options.hold,
            on_failure=OnFailure(options.on_failure),
        )
    except TransferConfigError as error:
        raise ConfigError(str(error)) from error
    return SidecarSettings(
        instance_id=options.instance_id or f"{options.role}-{port}",
        role=_ROLES[options.role],
        listen=options.listen,
        advertise=options.advertise or options.listen,
        transfer=transfer,
        tls=TlsConfig(ca=options.tls_ca, cert=options.tls_cert, key=options.tls_key),
        state_dir=options.state_dir,
        probe=options.probe,
        require_path=options.require_path,
    )


async def _run(settings: SidecarSettings, tracing: Tracing, command: Sequence[str]) -> int:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    try:
        environment = environment_for(os.environ, settings.transfer.backend)
    except AgentUnavailable as error:
        raise ConfigError(f"--backend {settings.transfer.backend}: {error}") from error
    return await Sidecar(settings, tracing).run(command, environment, stopping)


def run(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = _parser().parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        if not command:
            raise ConfigError("name the engine's command after --")
        settings = _settings(options)
        setup_logging(LoggingConfig(), PROGRAM, settings.instance_id)
        telemetry = TelemetryConfig(otlp_endpoint=options.otlp)
        tracing = Tracing.from_config(telemetry, PROGRAM, {"service.instance.id": settings.instance_id})
        try:
            return uvloop.run(_run(settings, tracing, command))
        finally:
            tracing.shutdown()
    except (ConfigError, StartError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    leave(run())
