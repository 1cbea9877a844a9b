"""CertificateService: client certificates, blocked identities, and the coordinator's authorities."""

import os
from typing import Final, final

from leasehold.v1 import certificate_service_pb2, errors_pb2
from leasehold.v1.certificate_service_pb2 import (
    Authority,
    Block,
    BlockIdentityRequest,
    BlockIdentityResponse,
    Certificate,
    CertificateState,
    ListAuthoritiesRequest,
    ListAuthoritiesResponse,
    ListBlocksRequest,
    ListBlocksResponse,
    ListCertificatesRequest,
    ListCertificatesResponse,
    RetireAuthorityRequest,
    RetireAuthorityResponse,
    RevokeCertificateRequest,
    RevokeCertificateResponse,
    RotateAuthorityRequest,
    RotateAuthorityResponse,
    UnblockIdentityRequest,
    UnblockIdentityResponse,
)
from leasehold.v1.certificate_service_pb2_grpc import CertificateServiceServicer

from leasehold_coordinator.access import authority
from leasehold_coordinator.access.certificates import CertificateRegistry, ClientCertificate, Revocation
from leasehold_coordinator.access.identities import Identity, parse_identity
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.unix_users import identity_of
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.authority_changes import AuthorityChanges
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.live_calls import LiveCalls
from leasehold_coordinator.fleet.revocations import Revocations
from leasehold_coordinator.lists.pages import DEFAULT_PAGE_SIZE, PAGE_SIZE_LIMIT
from leasehold_coordinator.timestamps import timestamp, unix_ns


@final
class CertificateService(CertificateServiceServicer):
    """Lists and revokes certificates, blocks identities, and rotates the authority."""

    def __init__(
        self,
        certificates: ClientCertificates,
        revocations: Revocations,
        changes: AuthorityChanges,
        calls: LiveCalls,
    ) -> None:
        self._certificates = certificates
        self._calls = calls
        self._changes = changes
        self._revocations = revocations
        self._unblockable = {identity_of(uid) for uid in (0, os.geteuid())}

    async def ListCertificates(
        self, request: ListCertificatesRequest, context: Context
    ) -> ListCertificatesResponse:
        if request.page_size < 0:
            raise invalid("page_size", f"page_size {request.page_size} is negative: give 0 or more")
        size = min(request.page_size or DEFAULT_PAGE_SIZE, PAGE_SIZE_LIMIT)
        registry = self._certificates.registry
        after = _position(registry, request.page_token)
        calls = self._calls.counts()
        listed = sorted(
            (_rank(one), one)
            for one in registry
            if _rank(one) > after
            and (request.include_ended or self._state(one) == _VALID or one.serial in calls)
        )
        page = [one for _, one in listed[:size]]
        return ListCertificatesResponse(
            certificates=[self._message(one, calls[one.serial]) for one in page],
            next_page_token=page[-1].serial if len(listed) > size else "",
        )

    async def RevokeCertificate(
        self, request: RevokeCertificateRequest, context: Context
    ) -> RevokeCertificateResponse:
        return RevokeCertificateResponse(serials=await self._revocations.revoke(_serial(request.serial)))

    async def ListBlocks(self, request: ListBlocksRequest, context: Context) -> ListBlocksResponse:
        return ListBlocksResponse(blocks=map(_block, self._certificates.registry.blocks()))

    async def BlockIdentity(self, request: BlockIdentityRequest, context: Context) -> BlockIdentityResponse:
        identity = _identity(request.identity)
        if identity in self._unblockable:
            raise invalid(
                "identity",
                f"{identity} can't be blocked, because this user could change the store: run the coordinator "
                "as another user",
            )
        return BlockIdentityResponse(block=_block(await self._revocations.block(identity)))

    async def UnblockIdentity(
        self, request: UnblockIdentityRequest, context: Context
    ) -> UnblockIdentityResponse:
        await self._revocations.unblock(_identity(request.identity))
        return UnblockIdentityResponse()

    async def ListAuthorities(
        self, request: ListAuthoritiesRequest, context: Context
    ) -> ListAuthoritiesResponse:
        counts = self._changes.counts()
        members = self._certificates.authorities.members
        return ListAuthoritiesResponse(
            authorities=[self._authority(one, counts[one.serial]) for one in members]
        )

    async def RotateAuthority(
        self, request: RotateAuthorityRequest, context: Context
    ) -> RotateAuthorityResponse:
        return RotateAuthorityResponse(authority=self._authority(await self._changes.rotate(), 0))

    async def RetireAuthority(
        self, request: RetireAuthorityRequest, context: Context
    ) -> RetireAuthorityResponse:
        await self._changes.retire(_serial(request.serial), force=request.force)
        return RetireAuthorityResponse()

    def _authority(self, found: authority.Authority, count: int) -> Authority:
        authorities, certificate = self._certificates.authorities, found.certificate
        is_new = found is authorities.newest and len(authorities.members) > 1
        waiting = self._certificates.waiting() if is_new else []
        return Authority(
            serial=found.serial,
            start_time=timestamp(unix_ns(certificate.not_valid_before_utc)),
            expire_time=timestamp(unix_ns(certificate.not_valid_after_utc)),
            signs_clients=found is authorities.newest,
            signs_server=found is authorities.server,
            valid_certificate_count=count,
            waiting_count=len(waiting),
            waiting=map(str, waiting[:WAITING_SHOWN]),
        )

    def _state(self, certificate: ClientCertificate) -> CertificateState.ValueType:
        if self._certificates.registry.is_revoked(certificate.serial):
            return certificate_service_pb2.CERTIFICATE_STATE_REVOKED
        if certificate.not_after <= self._certificates.now:
            return certificate_service_pb2.CERTIFICATE_STATE_EXPIRED
        if not self._certificates.is_valid(certificate):
            return certificate_service_pb2.CERTIFICATE_STATE_RETIRED
        return _VALID

    def _message(self, certificate: ClientCertificate, call_count: int) -> Certificate:
        return Certificate(
            serial=certificate.serial,
            identity=str(certificate.identity),
            state=self._state(certificate),
            predecessor=certificate.predecessor,
            authority=certificate.authority,
            start_time=timestamp(unix_ns(certificate.not_before)),
            expire_time=timestamp(unix_ns(certificate.not_after)),
            call_count=call_count,
        )


WAITING_SHOWN: Final = 16
"""Most identities that the answer about an authority names."""

_VALID: Final = certificate_service_pb2.CERTIFICATE_STATE_VALID


def _rank(certificate: ClientCertificate) -> tuple[str, int, str]:
    """The position of a certificate in the list."""
    return str(certificate.identity), unix_ns(certificate.not_before), certificate.serial


def _position(registry: CertificateRegistry, page_token: str) -> tuple[str, int, str]:
    """The position after which a page begins.

    Raises:
        FleetError: INVALID_TOKEN.
    """
    if not page_token:
        return "", 0, ""
    last = registry.get(page_token)
    if last is None:
        raise FleetError(
            errors_pb2.ERROR_REASON_INVALID_TOKEN,
            f"the page token {page_token[:64]!r} is not of this list, or too old: list from the start",
            field="page_token",
        )
    return _rank(last)


def _serial(text: str) -> str:
    """A serial number as the store has it. OpenSSL writes colons and leading zeros."""
    digits = text.lower().replace(":", "")
    return digits.lstrip("0") or digits


def _identity(text: str) -> Identity:
    """The identity of a request.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    try:
        return parse_identity(text)
    except ValueError as error:
        raise invalid("identity", str(error)) from error


def _block(revocation: Revocation) -> Block:
    return Block(
        identity=revocation.subject,
        blocked_by=revocation.actor,
        block_time=timestamp(revocation.create_time_ns),
    )
