"""The server interceptor of the listeners for workers and for enrolment: it applies the table of methods."""

from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeAlias, final

import grpc
from leasehold.v1 import errors_pb2

from leasehold_coordinator.access.methods import permits
from leasehold_coordinator.access.roles import Credential
from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.audit_refusals import AuditRefusals
from leasehold_coordinator.fleet.callers import host_of

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@final
class MethodGate(grpc.aio.ServerInterceptor):
    """Refuses each method of a listener that its callers' credential does not permit.

    The services of the listener establish the credential of each caller themselves. A service that is added
    to the listener is refused as long as the table of methods does not permit it.

    Args:
        held: The credential of the listener's callers.
        audit: Told of refusals.
    """

    def __init__(self, held: Credential, audit: AuditRefusals) -> None:
        self._held: Final = held
        self._audit: Final = audit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], "Awaitable[Handler | None]"],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> "Handler | None":
        """The handler of a call, or one that refuses the call. None: no service has the method."""
        method = handler_call_details.method
        found = await continuation(handler_call_details)
        if found is None or permits(method, self._held):
            return found

        async def refuse(_: object, context: Context) -> None:
            error = FleetError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"no caller with the credential {self._held.value} may call {method}: use another listener",
            )
            self._audit.note(error, method, host_of(context.peer()))
            ending = abort(context, error)
            del context  # see abort
            await ending

        return grpc.stream_stream_rpc_method_handler(refuse)
