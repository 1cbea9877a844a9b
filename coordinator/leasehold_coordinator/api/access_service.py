"""AccessService: role bindings, and the caller's own identity."""

from typing import final

from leasehold.v1.access_service_pb2 import (
    GrantRequest,
    GrantResponse,
    ListBindingsRequest,
    ListBindingsResponse,
    RevokeRequest,
    RevokeResponse,
    Role,
    WhoAmIRequest,
    WhoAmIResponse,
)
from leasehold.v1.access_service_pb2_grpc import AccessServiceServicer

from leasehold_coordinator import __version__
from leasehold_coordinator.access.bindings import Bindings
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.fleet.binding_changes import BindingChanges
from leasehold_coordinator.fleet.callers import require_caller


@final
class AccessService(AccessServiceServicer):
    """Serves and changes role bindings."""

    def __init__(self, bindings: Bindings, changes: BindingChanges) -> None:
        self._bindings = bindings
        self._changes = changes

    async def Grant(self, request: GrantRequest, context: Context) -> GrantResponse:
        return GrantResponse(binding=await self._changes.grant(request.binding))

    async def Revoke(self, request: RevokeRequest, context: Context) -> RevokeResponse:
        await self._changes.revoke(request.binding)
        return RevokeResponse()

    async def ListBindings(self, request: ListBindingsRequest, context: Context) -> ListBindingsResponse:
        return ListBindingsResponse(bindings=self._bindings.all())

    async def WhoAmI(self, request: WhoAmIRequest, context: Context) -> WhoAmIResponse:
        caller = require_caller()
        return WhoAmIResponse(
            identity=str(caller.identity),
            role=Role.Value(f"ROLE_{caller.role.name if caller.role else 'UNSPECIFIED'}"),
            on_behalf_of=str(caller.on_behalf_of or ""),
            coordinator_version=__version__,
        )
