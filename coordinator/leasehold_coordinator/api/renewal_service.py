"""RenewalService: the next certificate of a caller."""

from typing import final

from leasehold.v1 import errors_pb2
from leasehold.v1.enrolment_service_pb2 import RenewCertificateRequest, RenewCertificateResponse
from leasehold.v1.enrolment_service_pb2_grpc import RenewalServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.commands.enrolment import Enrolment
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import current_caller


@final
class RenewalService(RenewalServiceServicer):
    """Renews the certificate by which its caller calls."""

    def __init__(self, enrolment: Enrolment) -> None:
        self._enrolment = enrolment

    async def RenewCertificate(
        self, request: RenewCertificateRequest, context: Context
    ) -> RenewCertificateResponse:
        caller = current_caller()
        if caller is None:
            raise FleetError(errors_pb2.ERROR_REASON_UNAUTHENTICATED, "the caller is unknown")
        return await self._enrolment.renew(request, caller)
