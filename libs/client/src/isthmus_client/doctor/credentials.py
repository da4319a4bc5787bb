"""Files of keys and certificates that a configuration names: there, readable, valid today."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cryptography import x509

from isthmus_core.api_keys import read_keys
from isthmus_core.config import IsthmusConfig, TlsConfig
from isthmus_core.errors import ConfigError
from isthmus_core.tls import read_pem

# Enough for whoever renews them.
_SOON = timedelta(days=7)


def credential_problems(config: IsthmusConfig) -> Iterator[tuple[str, bool]]:
    """What is wrong, and whether nothing can work because of it."""
    if config.router.clients.keys_file is not None:
        try:
            read_keys(config.router.clients.keys_file)
        except ConfigError as error:
            yield str(error), True
    if config.tls.enabled:
        yield from _certificates(config.tls, datetime.now(UTC))


def _certificates(tls: TlsConfig, now: datetime) -> Iterator[tuple[str, bool]]:
    for name in ("ca", "cert", "key"):
        try:
            data = read_pem(tls, name)
        except ConfigError as error:
            yield str(error), True
            continue
        if name == "key":
            continue
        where = f"tls.{name} = {getattr(tls, name)}"
        try:
            certificate = x509.load_pem_x509_certificate(data)
        except ValueError:
            yield f"{where}: no certificate in it", True
            continue
        begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now > ends:
            yield f"{where}: expired on {ends:%Y-%m-%d %H:%M} UTC", True
        elif now < begins:
            yield f"{where}: valid from {begins:%Y-%m-%d %H:%M} UTC only; is the clock of this machine right?", True
        elif ends - now < _SOON:
            yield f"{where}: expires on {ends:%Y-%m-%d %H:%M} UTC", False
