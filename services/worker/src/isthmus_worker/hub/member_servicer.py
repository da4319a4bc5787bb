"""`isthmus.v1.MemberService`: a coordinator that lists this instance comes to it."""

from __future__ import annotations

from typing import Any, cast

import grpc.aio
from isthmus.v1 import member_service_pb2_grpc

from isthmus_core.errors import IsthmusError
from isthmus_core.rpc import abort_with
from isthmus_worker.hub.late_service import LateService
from isthmus_worker.member_line import AcceptedLine
from isthmus_worker.registration import Registration


class MemberServicer(member_service_pb2_grpc.MemberServiceServicer):
    """Hands every stream to the registration."""

    def __init__(self, registration: Registration) -> None:
        self._registration = registration

    async def Enlist(self, request_iterator: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """See member_service.proto."""
        try:
            await self._registration.enlisted(AcceptedLine(context))
        except IsthmusError as error:
            await abort_with(context, error)


def serve_member(service: LateService, registration: Registration) -> None:
    """Answer MemberService from now on."""
    # The generated function wants a server; of that it uses what LateService offers.
    server = cast("grpc.aio.Server", service)
    member_service_pb2_grpc.add_MemberServiceServicer_to_server(MemberServicer(registration), server)
