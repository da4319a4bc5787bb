"""Who may call what: every method of the schema has an answer, and nobody gets more than the role needs."""

from __future__ import annotations

import pytest
from isthmus.v1 import (
    coordinator_service_pb2,
    inference_service_pb2,
    kv_transfer_service_pb2,
    worker_service_pb2,
)

from isthmus_core.roles import Role, refusal, role_uri, roles_of, who_may

SCHEMA = (coordinator_service_pb2, inference_service_pb2, kv_transfer_service_pb2, worker_service_pb2)
METHODS = [
    f"/{service.full_name}/{method.name}"
    for module in SCHEMA
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_for_somebody_and_never_for_everybody(method: str):
    assert who_may(method), "a new method needs a line in isthmus_core.roles"
    assert who_may(method) != frozenset(Role)


@pytest.mark.parametrize(
    ("role", "method", "allowed"),
    [
        (Role.CLIENT, "/isthmus.v1.InferenceService/Generate", True),
        (Role.CLIENT, "/isthmus.v1.WorkerService/Generate", False),
        (Role.CLIENT, "/isthmus.v1.KvTransferService/GetInstanceInfo", False),
        (Role.ROUTER, "/isthmus.v1.CoordinatorService/Route", True),
        (Role.ROUTER, "/isthmus.v1.KvTransferService/Connect", False),
        (Role.ROUTER, "/isthmus.v1.CoordinatorService/Drain", False),
        (Role.WORKER, "/isthmus.v1.KvTransferService/Connect", True),
        (Role.WORKER, "/isthmus.v1.CoordinatorService/Route", False),
        (Role.OPERATOR, "/isthmus.v1.CoordinatorService/SetRole", True),
        (Role.OPERATOR, "/isthmus.v1.KvTransferService/GetInstanceInfo", False),
        (Role.COORDINATOR, "/isthmus.v1.WorkerService/Generate", False),
        (Role.COORDINATOR, "/isthmus.v1.MemberService/Enlist", True),
        (Role.ROUTER, "/isthmus.v1.MemberService/Enlist", False),
        (Role.OPERATOR, "/isthmus.v1.WorkerService/Unheard", False),
        (Role.OPERATOR, "/some.other.Service/Method", False),
    ],
)
def test_roles(role: Role, method: str, allowed: bool):
    reason = refusal(method, frozenset({role}))
    assert (reason is None) is allowed
    if reason is not None:
        assert method in reason
        assert role.value in reason


def test_roles_are_read_from_certificates_and_nothing_else_counts():
    names = [role_uri(Role.WORKER).encode(), b"worker", b"isthmus:role:king", b"router.example"]
    assert roles_of(names) == {Role.WORKER}
    assert roles_of([]) == frozenset()
