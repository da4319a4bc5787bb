"""API keys of clients: a file that holds their hashes, and who has which key.

    - name: team-a                   # who it is: the tenant, for limits, fairness and logs
      sha256: 5e884898da28…          # of the key; the key itself is nowhere
      requests_per_s: 10             # both limits may be left out
      tokens_per_min: 100000

Keys made by `new_key` have 256 random bits, so a fast hash is as good at rest as a slow one: nobody can try them all.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from pathlib import Path

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from isthmus_core.config_section import Section
from isthmus_core.errors import ConfigError

PREFIX = "isk-"
# Of a key that somebody chose: shorter ones could be found by trying.
LEAST_CHARS = 24
_INDEX_BYTES = 8


class ApiKey(Section):
    """One client. `sha256`: hex digest of its key. Limits: None = those of `router.clients`."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    requests_per_s: float | None = Field(default=None, gt=0, le=1e6)
    tokens_per_min: float | None = Field(default=None, gt=0, le=1e12)


_FILE = TypeAdapter(list[ApiKey])


def new_key() -> str:
    """A fresh key of 256 random bits, in characters that need no quoting."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What stands in the file. Raises ConfigError for a key that is too short to be safe."""
    if len(key) < LEAST_CHARS:
        raise ConfigError(f"a key of {len(key)} characters could be guessed: use at least {LEAST_CHARS}")
    return hashlib.sha256(key.encode()).hexdigest()


def read_keys(path: Path) -> list[ApiKey]:
    """The keys in a file, at least one. Raises ConfigError that names the entry and what is wrong with it."""
    try:
        return parse_keys(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"API keys {path}: {getattr(error, 'strerror', None) or error}") from error


def parse_keys(text: str, where: str) -> list[ApiKey]:
    """The keys in a file's text; `where` names it. Raises ConfigError."""
    try:
        keys = _FILE.validate_python(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise ConfigError(f"API keys {where} is not YAML: {error}") from error
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}" for one in error.errors(include_input=False)
        ]
        raise ConfigError(f"API keys {where}: {'; '.join(problems)}") from None
    if not keys:
        raise ConfigError(f"API keys {where}: no keys; nobody could ask for anything")
    for field in ("name", "sha256"):
        values = [getattr(key, field) for key in keys]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise ConfigError(f"API keys {where}: {field} {twice} is there twice")
    return keys


def write_keys(path: Path, keys: Iterable[ApiKey]) -> None:
    """Replace a file, whole or not at all, readable to its owner only. Raises ConfigError."""
    entries = [key.model_dump(exclude_none=True) for key in keys]
    text: str = yaml.safe_dump(entries, sort_keys=False)  # pyright: ignore[reportUnknownMemberType]
    fresh = path.with_name(f"{path.name}.new")
    try:
        fresh.touch(mode=0o600)
        fresh.write_text(text)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"API keys {path}: {error.strerror}") from error


class KeyRing:
    """Finds who has a key. How long that takes says nothing about keys that are known: what is looked up is the digest
    of what was shown, which nobody can steer, and whole digests are compared in constant time."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys: dict[bytes, list[tuple[bytes, ApiKey]]] = {}
        for key in keys:
            digest = bytes.fromhex(key.sha256)
            self._keys.setdefault(digest[:_INDEX_BYTES], []).append((digest, key))

    def find(self, shown: str) -> ApiKey | None:
        """Whose key this is, or None."""
        digest = hashlib.sha256(shown.encode("utf-8", "surrogatepass")).digest()
        for known, key in self._keys.get(digest[:_INDEX_BYTES], ()):
            if hmac.compare_digest(known, digest):
                return key
        return None
