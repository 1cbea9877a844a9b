"""EnrolmentService: join tokens."""

from typing import final

from leasehold.v1.enrolment_service_pb2 import (
    CreateJoinTokenRequest,
    CreateJoinTokenResponse,
    DeleteJoinTokenRequest,
    DeleteJoinTokenResponse,
    ListJoinTokensRequest,
    ListJoinTokensResponse,
    UnbindGpuRequest,
    UnbindGpuResponse,
)
from leasehold.v1.enrolment_service_pb2_grpc import EnrolmentServiceServicer

from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.commands.join_tokens import JoinTokenChanges


@final
class EnrolmentService(EnrolmentServiceServicer):
    """Creates, lists and deletes join tokens."""

    def __init__(self, tokens: JoinTokenChanges) -> None:
        self._tokens = tokens

    async def CreateJoinToken(
        self, request: CreateJoinTokenRequest, context: Context
    ) -> CreateJoinTokenResponse:
        return await self._tokens.create(request)

    async def ListJoinTokens(
        self, request: ListJoinTokensRequest, context: Context
    ) -> ListJoinTokensResponse:
        return ListJoinTokensResponse(join_tokens=self._tokens.all())

    async def DeleteJoinToken(
        self, request: DeleteJoinTokenRequest, context: Context
    ) -> DeleteJoinTokenResponse:
        return DeleteJoinTokenResponse(join_token=await self._tokens.delete(request.join_token_id))

    async def UnbindGpu(self, request: UnbindGpuRequest, context: Context) -> UnbindGpuResponse:
        return UnbindGpuResponse(identity=await self._tokens.unbind_gpu(request.gpu_uuid))
