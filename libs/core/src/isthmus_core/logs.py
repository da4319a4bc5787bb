"""Logs: stdlib logging to stderr, one line per event, for people (console) or collectors (json).

Structured fields travel as `extra={...}`; `request_id`, `attempt`, `trace_id` and `peer` are the customary ones.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from isthmus_core.config import LoggingConfig

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


def _extras(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class ConsoleFormatter(logging.Formatter):
    """`12:00:00.123 INFO  router  message  key=value`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extras = "".join(f"  {key}={value}" for key, value in _extras(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._name}  {record.getMessage()}{extras}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, service, instance, logger, message, then the extra fields."""

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._constant = {"service": service, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            **self._constant,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str, ensure_ascii=False)


def setup_logging(config: LoggingConfig, service: str, instance: str = "") -> None:
    """Send the root logger's records of at least `config.level` to stderr. Call once, at start."""
    handler = logging.StreamHandler(sys.stderr)
    name = instance or service
    handler.setFormatter(JsonFormatter(service, instance) if config.format == "json" else ConsoleFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level)
    for noisy in ("asyncio", "grpc", "httpx", "httpcore", "uvicorn.access", "opentelemetry"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
