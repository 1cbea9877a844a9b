"""JoinService: the first certificate of a worker, a user or a service. Its callers have no identity."""

from typing import final

import grpc
from leasehold.v1 import enrolment_service_pb2
from leasehold.v1.enrolment_service_pb2 import JoinRequest, JoinResponse

from leasehold_coordinator.api.authentication import require_tls
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.single_calls import single_call
from leasehold_coordinator.commands.enrolment import Enrolment
from leasehold_coordinator.fleet.callers import host_of


@final
class JoinService:
    """Issues certificates for join tokens."""

    def __init__(self, enrolment: Enrolment) -> None:
        self._enrolment = enrolment

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service with a server."""
        name = enrolment_service_pb2.DESCRIPTOR.services_by_name["JoinService"].full_name
        handler = grpc.method_handlers_generic_handler(name, {"Join": single_call(JoinRequest, self._join)})
        server.add_generic_rpc_handlers((handler,))

    async def _join(self, request: JoinRequest, context: Context) -> JoinResponse:
        require_tls(context)
        return await self._enrolment.join(request, host_of(context.peer()))
