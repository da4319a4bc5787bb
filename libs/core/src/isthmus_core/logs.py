"""Logs: stdlib logging to stderr, one line per event, for people (console) or collectors (json).

Structured fields travel as `extra={...}`; `request_id`, `attempt`, `trace_id` and `peer` are the customary ones, and
`about` makes those of a request. A line that can not be written (a full disk, a reader that has gone) is dropped and
counted: it never stops what it speaks about.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

from isthmus_core.config_telemetry import LoggingConfig
from isthmus_core.keys import RequestKey
from isthmus_core.trace_context import TraceContext

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


class _Handler(logging.StreamHandler[TextIO]):
    """Drops what can not be written, and says how much it was as soon as something can be."""

    lost = 0

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._unsaid = 0

    def emit(self, record: logging.LogRecord) -> None:
        unsaid = self._unsaid
        super().emit(record)
        if unsaid and unsaid == self._unsaid:
            self._unsaid = 0
            logging.getLogger(__name__).warning("%d log lines before this one could not be written", unsaid)

    def handleError(self, record: logging.LogRecord) -> None:
        _Handler.lost += 1
        self._unsaid += 1


def lost_lines() -> int:
    """Log lines of this process that could not be written."""
    return _Handler.lost


def about(key: RequestKey, trace: TraceContext | None = None, **fields: str | int | float | None) -> dict[str, Any]:
    """`extra` of a line about a request. Fields that are None are left out."""
    known: dict[str, Any] = {"request_id": key.request_id, "attempt": key.attempt}
    if trace is not None:
        known["trace_id"] = trace.trace_id.hex()
    return known | {name: value for name, value in fields.items() if value is not None}


def setup_logging(config: LoggingConfig, service: str, instance: str = "") -> None:
    """Send the root logger's records of at least `config.level` to stderr. Call once, at start."""
    handler = _Handler(sys.stderr)
    name = instance or service
    handler.setFormatter(JsonFormatter(service, instance) if config.format == "json" else ConsoleFormatter(name))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level)
    for noisy in ("asyncio", "grpc", "httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
