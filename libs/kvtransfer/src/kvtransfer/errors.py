"""One tree of errors. Callers branch on the type, never on the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtransfer.ports import Incompatibility, RequestKey


class KVTransferError(Exception):
    """Base of everything this package raises on purpose."""


class GeometryError(KVTransferError):
    """A description of storage or topology contradicts itself. Names the field and its value."""

    def __init__(self, field: str, value: object, problem: str) -> None:
        super().__init__(f"{field} = {value}: {problem}")
        self.field = field
        self.value = value
        self.problem = problem


class TransferConfigError(KVTransferError):
    """A setting of the transfer can not work. Names the field, its value and what would be accepted."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        super().__init__(f"transfer.{field} = {value!r}: {remedy}")
        self.field = field
        self.value = value
        self.remedy = remedy


class WireError(KVTransferError):
    """A message of a peer is malformed. Names the field; the message must not be used, not even partly."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PeerIncompatible(KVTransferError):
    """Two instances can not work together. Carries every reason, not only the first."""

    def __init__(self, incompatibilities: Sequence[Incompatibility]) -> None:
        super().__init__("; ".join(str(one) for one in incompatibilities))
        self.incompatibilities = tuple(incompatibilities)


class PlanError(KVTransferError):
    """A request can not be turned into addresses: block lists or token range do not fit the plan."""


class ManifestError(KVTransferError):
    """Delivered extents contradict each other or the need. The cache must not be used."""


class TransferStateError(KVTransferError):
    """A call or message does not fit the state of the hand-off it names."""

    def __init__(self, key: RequestKey, problem: str) -> None:
        super().__init__(f"request {key} {problem}")
        self.key = key
        self.problem = problem


class LedgerError(KVTransferError):
    """A step that could let a page be written by two attempts, or freed under a write. Nothing was changed."""


class ArenaError(KVTransferError):
    """The memory for chunks is too small, or a block of it is taken or given back twice."""


class ProtocolError(KVTransferError):
    """A peer said what the protocol does not allow at this point. The stream must end; sessions are not touched."""


class AgentError(KVTransferError):
    """The transfer agent refused or failed an operation."""


class AgentUnknown(AgentError):
    """No agent of that name is registered."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        super().__init__(f"unknown transfer backend {name!r}, known: {', '.join(sorted(known)) or 'none'}")
        self.name = name


class AgentUnavailable(AgentError):
    """The agent exists but can not work on this machine or with this environment."""


class PeerLost(AgentError):
    """The peer of a write is gone: its process ended or the connection to it broke."""


class AgentBroken(AgentError):
    """The agent can not tell any more whether posted writes are over. Only the end of the process settles them."""
