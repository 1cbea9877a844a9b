"""Calls about client certificates, blocked identities and the authorities."""

from leasehold.v1 import certificate_service_pb2
from leasehold.v1.certificate_service_pb2 import Authority, Block, Certificate
from leasehold.v1.certificate_service_pb2_grpc import CertificateServiceStub

from leasehold_client.aio.connection import AsyncConnection
from leasehold_client.request_fields import build

PAGE_SIZE = 1000


class AsyncCertificateCalls:
    """Lists and revokes certificates, blocks identities, and rotates the authority. For administrators.

    Args:
        connection: The connection to the coordinator.
    """

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._stub = CertificateServiceStub(connection.channel)

    async def all(self, *, include_ended: bool = False) -> list[Certificate]:
        """The client certificates, by identity and time of issue.

        Args:
            include_ended: Also those that are not valid.
        """
        found: list[Certificate] = []
        request = certificate_service_pb2.ListCertificatesRequest(
            page_size=PAGE_SIZE, include_ended=include_ended
        )
        while True:
            page = await self._connection.read(self._stub.ListCertificates, request)
            found += page.certificates
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    async def revoke(self, serial: str) -> list[str]:
        """Revokes a certificate, and all that descend from it by renewal. Returns their serial numbers.

        Raises:
            LeaseholdError: UNKNOWN_CERTIFICATE. STORAGE_UNAVAILABLE: it is revoked until a restart.
        """
        request = build(certificate_service_pb2.RevokeCertificateRequest, serial=serial)
        response = await self._connection.once(self._stub.RevokeCertificate, request)
        return list(response.serials)

    async def authorities(self) -> list[Authority]:
        """The authorities of the coordinator, the oldest first."""
        request = certificate_service_pb2.ListAuthoritiesRequest()
        response = await self._connection.read(self._stub.ListAuthorities, request)
        return list(response.authorities)

    async def rotate(self) -> Authority:
        """Adds a second authority, which signs client certificates from now on.

        Raises:
            LeaseholdError: AUTHORITY_IN_USE, there are two already.
        """
        request = certificate_service_pb2.RotateAuthorityRequest()
        response = await self._connection.once(self._stub.RotateAuthority, request)
        return response.authority

    async def retire(self, serial: str, *, force: bool = False) -> None:
        """Ends the trust in one of two authorities.

        Args:
            serial: Serial number of the authority.
            force: Also if valid client certificates of the authority are left.

        Raises:
            LeaseholdError: UNKNOWN_CERTIFICATE or AUTHORITY_IN_USE.
        """
        request = build(certificate_service_pb2.RetireAuthorityRequest, serial=serial, force=force)
        await self._connection.once(self._stub.RetireAuthority, request)

    async def blocks(self) -> list[Block]:
        """The blocked identities."""
        request = certificate_service_pb2.ListBlocksRequest()
        response = await self._connection.read(self._stub.ListBlocks, request)
        return list(response.blocks)

    async def block(self, identity: str) -> Block:
        """Blocks an identity on every listener and with each credential.

        Args:
            identity: ``worker/NAME``, ``user/NAME``, ``service/NAME`` or ``local/LOGIN``.

        Raises:
            LeaseholdError: INVALID_ARGUMENT. STORAGE_UNAVAILABLE: it is blocked until a restart.
        """
        request = build(certificate_service_pb2.BlockIdentityRequest, identity=identity)
        response = await self._connection.once(self._stub.BlockIdentity, request)
        return response.block

    async def unblock(self, identity: str) -> None:
        """Ends a block.

        Raises:
            LeaseholdError: UNKNOWN_CERTIFICATE, the identity is not blocked.
        """
        request = build(certificate_service_pb2.UnblockIdentityRequest, identity=identity)
        await self._connection.once(self._stub.UnblockIdentity, request)
