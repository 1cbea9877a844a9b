"""RenewalService: the next certificate of a caller."""

from typing import final

import grpc
from leasehold.v1 import enrolment_service_pb2, errors_pb2
from leasehold.v1.enrolment_service_pb2 import RenewCertificateRequest, RenewCertificateResponse
from leasehold.v1.enrolment_service_pb2_grpc import RenewalServiceServicer

from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.api.authentication import Authentication
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.single_calls import single_call
from leasehold_coordinator.commands.enrolment import RENEW, Enrolment
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.callers import current_caller, host_of


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


@final
class WorkerRenewals:
    """The same service on the listener for workers."""

    def __init__(self, enrolment: Enrolment, authentication: Authentication, audit: AuditRefusals) -> None:
        self._enrolment = enrolment
        self._authentication = authentication
        self._audit = audit

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the service with a server."""
        name = enrolment_service_pb2.DESCRIPTOR.services_by_name["RenewalService"].full_name
        handlers = {"RenewCertificate": single_call(RenewCertificateRequest, self._renew)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))

    async def _renew(self, request: RenewCertificateRequest, context: Context) -> RenewCertificateResponse:
        caller: Caller | None = None
        try:
            caller = self._authentication.worker(context)
            return await self._renew_of(caller, request)
        except FleetError as error:
            self._audit.note(error, RENEW, host_of(context.peer()), caller=caller)
            raise

    async def _renew_of(
        self, caller: Caller | None, request: RenewCertificateRequest
    ) -> RenewCertificateResponse:
        if caller is None:
            raise FleetError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                "the caller has no certificate, but the token of workers, which never expires",
            )
        return await self._enrolment.renew(request, caller)
