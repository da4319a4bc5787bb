"""Which conversation a request belongs to, as a short key: its requests find their cache where the last one left it.

A client may name the session. Otherwise the opening of the conversation does: all turns up to the first one of the
user. It stays the same while the conversation grows, whichever router gets the next request, and nothing has to be
remembered. Texts without turns belong to no conversation.
"""

from __future__ import annotations

import json
from hashlib import blake2b

from isthmus_core.errors import InvalidRequest
from isthmus_router.requests import ChatInput, TextInput, TokenInput

KEY_BYTES = 16
SESSION_HEADER = "x-session-id"
TENANT_HEADER = "x-tenant-id"
MAX_SESSION_CHARS = 256


def check_session(session: str, field: str) -> str:
    """The session's name. Raises InvalidRequest for one that is too long."""
    if len(session) > MAX_SESSION_CHARS:
        raise InvalidRequest(field, f"{len(session)} characters", f"use up to {MAX_SESSION_CHARS}")
    return session


def affinity_key(session: str, tenant: str, source: TextInput | TokenInput | ChatInput) -> bytes:
    """16 bytes; b"" for a request of no conversation. Sessions of different tenants are different ones."""
    if session:
        return _digest("session", tenant, session)
    if not isinstance(source, ChatInput):
        return b""
    opening: list[str] = [json.dumps([dict(tool) for tool in source.chat.tools])] if source.chat.tools else []
    for turn in source.chat.turns:
        opening += (turn.role, turn.content)
        if turn.role == "user":
            return _digest("opening", tenant, *opening)
    return b""


def tenant_of(named: str, authorization: str) -> str:
    """Who asks, for fairness: as the tenant header says, else a digest of the API key, else "" for everybody else."""
    if named:
        return named
    key = authorization.removeprefix("Bearer ").strip()
    return f"key-{_digest('key', key).hex()[:12]}" if key else ""


def _digest(*parts: str) -> bytes:
    digest = blake2b(digest_size=KEY_BYTES)
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.digest()
