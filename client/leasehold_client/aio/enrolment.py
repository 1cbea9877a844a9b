"""Calls about join tokens and the GPUs of enrolled workers."""

from leasehold.v1 import enrolment_service_pb2
from leasehold.v1.enrolment_service_pb2 import CreateJoinTokenResponse, JoinToken
from leasehold.v1.enrolment_service_pb2_grpc import EnrolmentServiceStub

from leasehold_client.aio.connection import AsyncConnection
from leasehold_client.messages import duration
from leasehold_client.request_fields import build


class AsyncEnrolmentCalls:
    """Creates, lists and deletes join tokens. For administrators.

    Args:
        connection: The connection to the coordinator.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._stub = EnrolmentServiceStub(connection.channel)

    async def create_join_token(
        self, identity: str, *, ttl_s: float | None = None, uses: int = 1, replace: bool = False
    ) -> CreateJoinTokenResponse:
        """Creates a join token. Only the response has its secret, within ``ticket``.

        Args:
            identity: ``worker/NAME``, ``user/NAME`` or ``service/NAME``. NAME may be a pattern with ``*``.
            ttl_s: Seconds until the token expires, at most 7 days. None: an hour.
            uses: Number of identities that may join by a pattern, at most 256.
            replace: Let an identity join that has a certificate, which is then revoked.

        Raises:
            LeaseholdError: INVALID_ARGUMENT, TOO_MANY_JOIN_TOKENS, or UNSUPPORTED_CAPABILITY if the
                coordinator has no listener for enrolment.
        """
        request = build(
            enrolment_service_pb2.CreateJoinTokenRequest,
            identity=identity,
            ttl=duration(ttl_s),
            uses=uses,
            replace=replace,
        )
        # Once: a repeated call would create another token.
        return await self._connection.once(self._stub.CreateJoinToken, request)

    async def join_tokens(self) -> list[JoinToken]:
        """The join tokens that have not expired."""
        request = enrolment_service_pb2.ListJoinTokensRequest()
        response = await self._connection.read(self._stub.ListJoinTokens, request)
        return list(response.join_tokens)

    async def delete_join_token(self, join_token_id: str) -> JoinToken:
        """Deletes a join token. Certificates that were issued for it stay valid.

        Raises:
            LeaseholdError: UNKNOWN_JOIN_TOKEN.
        """
        request = build(enrolment_service_pb2.DeleteJoinTokenRequest, join_token_id=join_token_id)
        # Once: a repeated call would not find the token.
        response = await self._connection.once(self._stub.DeleteJoinToken, request)
        return response.join_token

    async def unbind_gpu(self, gpu_uuid: str) -> str:
        """Unbinds a GPU from the identity of an enrolled worker, and returns the identity.

        Raises:
            LeaseholdError: UNKNOWN_GPU, or WORKER_CONNECTED.
        """
        request = build(enrolment_service_pb2.UnbindGpuRequest, gpu_uuid=gpu_uuid)
        # Once: a repeated call would not find the binding.
        response = await self._connection.once(self._stub.UnbindGpu, request)
        return response.identity
