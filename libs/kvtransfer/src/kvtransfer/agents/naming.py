"""Names that never repeat: a peer that restarts must not be taken for the one it replaces."""

from __future__ import annotations

import os
import socket
import uuid


def unique_agent_name(label: str) -> str:
    """`label@host:pid:random`, at most 250 characters."""
    return f"{label[:64]}@{socket.gethostname()[:128]}:{os.getpid()}:{uuid.uuid4().hex}"
