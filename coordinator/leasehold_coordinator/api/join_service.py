"""JoinService: the first certificate of a worker, a user or a service. Its callers have no identity."""

from typing import final

from leasehold.v1.enrolment_service_pb2 import JoinRequest, JoinResponse
from leasehold.v1.enrolment_service_pb2_grpc import JoinServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.commands.enrolment import Enrolment
from leasehold_coordinator.fleet.callers import host_of


@final
class JoinService(JoinServiceServicer):
    """Issues certificates for join tokens."""

    def __init__(self, enrolment: Enrolment) -> None:
        self._enrolment = enrolment

    async def Join(self, request: JoinRequest, context: Context) -> JoinResponse:
        return await self._enrolment.join(request, host_of(context.peer()))
