"""Who may call what, when the hops are authenticated (mutual TLS).

A role is a URI in the subject alternative names of the caller's certificate, `isthmus:role:worker`. A certificate may
carry several. Without TLS there is nobody to ask, and every caller may do everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum

_PREFIX = "isthmus:role:"


class Role(Enum):
    """What a certificate lets its holder do."""

    ROUTER = "router"
    COORDINATOR = "coordinator"
    WORKER = "worker"
    OPERATOR = "operator"
    CLIENT = "client"


def role_uri(role: Role) -> str:
    """As it stands in a certificate."""
    return _PREFIX + role.value


def roles_of(names: Iterable[bytes]) -> frozenset[Role]:
    """Roles among the subject alternative names of a peer; unknown ones are nobody's."""
    known = {role_uri(role).encode(): role for role in Role}
    return frozenset(known[name] for name in names if name in known)


_ANYBODY = frozenset(Role)
_OPERATOR = frozenset({Role.OPERATOR})
_SEES = frozenset({Role.OPERATOR, Role.ROUTER})
_MOVES = frozenset({Role.WORKER})
# By full method name, or by service for all of its methods. What is not listed is refused.
_MAY: Mapping[str, frozenset[Role]] = {
    "/isthmus.v1.InferenceService": frozenset({Role.CLIENT, Role.OPERATOR, Role.ROUTER}),
    "/isthmus.v1.WorkerService": frozenset({Role.ROUTER}),
    "/isthmus.v1.WorkerService/GetTimeline": _SEES,
    # Only workers learn the descriptors of agents and the addresses of blocks.
    "/isthmus.v1.KvTransferService": _MOVES,
    "/isthmus.v1.KvTransferService/PlanTransfer": _OPERATOR | _MOVES,
    "/isthmus.v1.KvTransferService/Probe": _OPERATOR | _MOVES,
    "/isthmus.v1.KvTransferService/ListSessions": _OPERATOR,
    "/isthmus.v1.CoordinatorService/Register": _MOVES,
    "/isthmus.v1.CoordinatorService/Route": frozenset({Role.ROUTER}),
    "/isthmus.v1.CoordinatorService/GetCluster": _SEES | _MOVES,
    "/isthmus.v1.CoordinatorService/WatchCluster": _SEES,
    "/isthmus.v1.CoordinatorService/Drain": _OPERATOR,
    "/isthmus.v1.CoordinatorService/SetRole": _OPERATOR,
    "/isthmus.v1.MemberService": frozenset({Role.COORDINATOR}),
    "/grpc.health.v1.Health": _ANYBODY,
    "/grpc.reflection.v1alpha.ServerReflection": _ANYBODY,
    "/grpc.reflection.v1.ServerReflection": _ANYBODY,
}


def who_may(method: str) -> frozenset[Role]:
    """Roles that may call a method (`/package.Service/Method`); empty for one that nobody has thought of."""
    return _MAY.get(method, _MAY.get(method.rpartition("/")[0], frozenset()))


def refusal(method: str, held: frozenset[Role]) -> str | None:
    """Why a caller with these roles may not call a method, or None when it may."""
    allowed = who_may(method)
    if held & allowed:
        return None
    names = ", ".join(sorted(role.value for role in allowed)) or "nobody"
    mine = ", ".join(sorted(role.value for role in held)) or "none"
    return f"{method} is for the roles {names}; the caller's certificate has {mine}"
