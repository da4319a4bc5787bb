"""A development CA, and one certificate for each role of the control plane.

    certs/ca.crt  ca.key          signs the others; the key never leaves this folder
    certs/router.crt  router.key  …  worker, coordinator, operator, client

The role is a URI in the certificate's subject alternative names: `isthmus:role:router`. The names of machines are in it
too, so that one set serves all hosts that are named.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from isthmus_core.errors import ConfigError
from isthmus_core.roles import Role, role_uri

_CA_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Isthmus development CA")])


class Authority:
    """A CA in a folder. Keys are readable to their owner only."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self._folder, self._key, self._certificate = folder, key, certificate

    @classmethod
    def open(cls, folder: Path, days: int) -> Authority:
        """The CA of `folder`, made when there is none. Raises ConfigError."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / "ca.key").exists():
                return cls._load(folder)
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _sign(_CA_NAME, key, _CA_NAME, key, days, x509.BasicConstraints(ca=True, path_length=0), [])
            _write(folder / "ca.key", _private(key), 0o600)
            _write(folder / "ca.crt", _public(certificate), 0o644)
        except OSError as error:
            raise ConfigError(f"{folder}: {error.strerror}") from error
        return cls(folder, key, certificate)

    @classmethod
    def _load(cls, folder: Path) -> Authority:
        try:
            key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
            certificate = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigError(f"{folder}: ca.key or ca.crt is damaged ({error}); remove both to begin anew") from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{folder}/ca.key is not a key of this tool; use another folder")
        return cls(folder, key, certificate)

    def issue_roles(self, hosts: Sequence[str], days: int) -> list[Path]:
        """A certificate for each role, valid for `hosts` (names, addresses). Returns the files. Raises ConfigError."""
        return [self.issue(role.value, [role], hosts, days) for role in Role]

    def issue(self, name: str, roles: Sequence[Role], hosts: Sequence[str], days: float) -> Path:
        """`name`.crt and `name`.key; `days` may be negative for tests of what has expired. Raises ConfigError."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(role_uri(role)) for role in roles]
        names += [_host(one) for one in hosts]
        constraints = x509.BasicConstraints(ca=False, path_length=None)
        certificate = _sign(subject, key, self._certificate.subject, self._key, days, constraints, names)
        try:
            _write(self._folder / f"{name}.key", _private(key), 0o600)
            _write(self._folder / f"{name}.crt", _public(certificate), 0o644)
        except OSError as error:
            raise ConfigError(f"{self._folder}: {error.strerror}") from error
        return self._folder / f"{name}.crt"


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError as error:
        raise ConfigError(f"--host {text}: neither an address nor an ASCII name of a machine") from error


def _sign(
    subject: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Name,
    issuer_key: ec.EllipticCurvePrivateKey,
    days: float,
    constraints: x509.BasicConstraints,
    names: Sequence[x509.GeneralName],
) -> x509.Certificate:
    now = datetime.now(UTC)
    end = now + timedelta(days=days)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ by minutes.
        .not_valid_before(min(now, end) - timedelta(hours=1))
        .not_valid_after(end)
        .add_extension(constraints, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if names:
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        builder = builder.add_extension(usage, critical=False)
    return builder.sign(issuer_key, hashes.SHA256())


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _public(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write(path: Path, data: bytes, mode: int) -> None:
    """Whole or not at all: a process may be loading the file that it replaces."""
    fresh = path.with_name(f"{path.name}.new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(data)
    fresh.replace(path)
