"""Issues client certificates: the first one for a join token, and the next one for the present one."""

import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.enrolment_service_pb2 import (
    IssuedCertificate,
    JoinRequest,
    JoinResponse,
    RenewCertificateRequest,
    RenewCertificateResponse,
)
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.worker.v1.session_pb2 import Hello

from leasehold_coordinator.access.authority import CLOCK_DIFFERENCE
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.certificates import ClientCertificate
from leasehold_coordinator.access.failure_limits import FailureLimits
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.access.join_tokens import StoredJoinToken
from leasehold_coordinator.access.named_resources import named_resources
from leasehold_coordinator.access.signing_requests import certificate_key_digest, key_digest
from leasehold_coordinator.access.worker_bindings import WorkerBinding
from leasehold_coordinator.commands.join_requests import (
    REQUEST_LIMIT,
    exhausted,
    read_csr,
    read_join,
    replayed,
    unknown_token,
)
from leasehold_coordinator.errors import STORE_FAILURES, FleetError
from leasehold_coordinator.fleet.audit_entries import call_rows
from leasehold_coordinator.fleet.bound_workers import check_own_id
from leasehold_coordinator.fleet.client_certificates import ClientCertificates
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.storage.enrolment_rows import binding_row, join_token_row
from leasehold_coordinator.storage.rows import Change, event_row
from leasehold_coordinator.timestamps import timestamp

logger = logging.getLogger(__name__)

JOIN: Final = "/leasehold.v1.JoinService/Join"
RENEW: Final = "/leasehold.v1.RenewalService/RenewCertificate"
"""The methods, in the audit."""

RENEW_AT: Final = (0.45, 0.55)
"""The part of a certificate's life after which its holder renews it, least and most."""

RENEW_FROM: Final = 0.4
"""The part of a certificate's life before which a renewal is refused. Nobody can collect certificates."""


@final
class Enrolment:
    """Issues certificates, one at a time.

    Args:
        fleet: The known state.
        certificates: The client certificates.
        authorities: The certificates of the CAs, in DER, by which holders verify the coordinator.
        is_admin: Whether an identity, as KIND/NAME, is an admin by a binding or as a Unix user.
    """

    def __init__(
        self,
        fleet: Fleet,
        certificates: ClientCertificates,
        authorities: Callable[[], Sequence[bytes]],
        is_admin: Callable[[str], bool],
    ) -> None:
        self._is_admin = is_admin
        self._fleet = fleet
        self._certificates = certificates
        self._authorities = authorities
        self._failures = FailureLimits()
        self.addresses: dict[Kind, str] = {}
        """HOST:PORT of the listener of each kind, as its callers reach it."""

    async def join(self, request: JoinRequest, address: str) -> JoinResponse:
        """Issues the first certificate of an identity, or the same certificate again.

        Args:
            request: The request.
            address: The host of the caller, whose failures are limited.

        Raises:
            FleetError: JOIN_REFUSED, IDENTITY_MISMATCH, ALREADY_ENROLLED, DUPLICATE_WORKER_ID,
                DUPLICATE_WORKER_GPU, INVALID_ARGUMENT, NOT_PERMITTED, TOO_MANY_CALLS or STORAGE_UNAVAILABLE.
        """
        wait_s = self._failures.wait_s(address, time.monotonic())
        if wait_s and self._find(request.secret) is None:  # hosts behind one address keep out nobody
            self._fleet.audit.note(unknown_token(), JOIN, address, resources=named_resources(JOIN, request))
            raise FleetError(
                errors_pb2.ERROR_REASON_TOO_MANY_CALLS,
                f"too many joins from this address failed: try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        try:
            identity, issued = await self._fleet.store.health.unless_stalled(self._join(request, address))
        except FleetError as error:
            self._fleet.audit.note(error, JOIN, address, resources=named_resources(JOIN, request))
            if error.reason not in STORE_FAILURES:
                self._failures.fail(address, time.monotonic())
                if self._fleet.refusals.may_tell_host(address):
                    logger.warning("refused a join of %.80r: %s", request.identity, error.message)
                    self._fleet.events.join_refused(request.identity[:80], error)
            raise
        return JoinResponse(
            certificate=self._message(issued), coordinator=self.addresses.get(identity.kind, "")
        )

    async def _join(self, request: JoinRequest, address: str) -> tuple[Identity, ClientCertificate]:
        async with self._fleet.enrolling:
            token = self._find(request.secret)
            if token is None:
                raise unknown_token()
            identity, signed = read_join(request, token)
            digest = key_digest(signed.key)
            audited = call_rows(Caller(identity, address), JOIN, request, str(identity))
            if digest in token.joins:
                issued = self._issued_before(token, identity, digest, signed.digest)
                repeated = token.repeated(digest, signed.digest)
                await self._fleet.store.write(join_token_row(repeated), *audited)
                self._fleet.join_tokens.put(repeated)
                return identity, issued
            if token.token.uses_left < 1:
                raise unknown_token()
            known = self._certificates.registry.of(identity)
            # A backup of the CA's files makes the certificates of a retired authority valid again.
            replaced = [one for one in known if not self._certificates.is_expired_or_revoked(one)]
            is_valid = any(map(self._certificates.is_valid, replaced))
            # The id of a worker protects its name. Any holder of a token with a pattern could take a user's.
            is_named = identity.kind is Kind.WORKER or token.token.identity == str(identity)
            if replaced and not is_valid and not is_named:
                raise FleetError(
                    errors_pb2.ERROR_REASON_ALREADY_ENROLLED,
                    f"{identity} has a certificate of a retired authority, and a token with a pattern "
                    "replaces none: ask an admin for a token of "
                    f"`leasehold token create --{identity.kind} {identity.name}`",
                )
            if is_valid and not token.token.replace:
                raise FleetError(
                    errors_pb2.ERROR_REASON_ALREADY_ENROLLED,
                    f"{identity} has a valid certificate: take another name, or replace the certificate with "
                    f"a token of `leasehold token create --{identity.kind} {identity.name} --replace`",
                )
            used = token.used(digest, identity, signed.digest)
            rows: list[Change] = [join_token_row(used)]
            binding = self._bind(request, identity.name) if identity.kind is Kind.WORKER else None
            if binding is not None:
                rows.append(binding_row(binding))
            event = self._fleet.events.joined(identity, token.token.join_token_id, request.worker_id)
            rows.append(event_row(event))
            rows += audited
            with self._fleet.bindings.being_stored(binding):
                serials = [one.serial for one in replaced]
                issued = await self._certificates.issue(signed.key, identity, replaced=serials, rows=rows)
            self._fleet.join_tokens.put(used)
            self._fleet.events.publish(event)
            return identity, issued

    def _find(self, secret: bytes) -> StoredJoinToken | None:
        """The token with this secret, unless it has expired, or its creator could not create it by now."""
        stored = self._fleet.join_tokens.find(secret)
        if stored is None or stored.has_expired(self._fleet.store.highest_time_ns):
            return None
        creator = stored.token.creator
        if self._certificates.registry.is_revoked(creator):  # blocked
            return None
        return stored if stored.token.creator_claimed or self._is_admin(creator) else None

    def _issued_before(
        self, token: StoredJoinToken, identity: Identity, digest: bytes, request: bytes
    ) -> ClientCertificate:
        """The certificate that an earlier join with the same secret and key got.

        Args:
            token: The token.
            identity: Who joins.
            digest: SHA-256 of the public key.
            request: The digest of the certificate request.

        Raises:
            FleetError: JOIN_REFUSED, for example of a request that got the certificate before.
        """
        join = token.joins[digest]
        if request in join.requests:
            raise replayed(identity)
        if len(join.requests) >= REQUEST_LIMIT:
            raise exhausted(identity)
        for one in self._certificates.registry.of(identity):
            is_same = join.identity == str(identity) and certificate_key_digest(one.der) == digest
            if is_same and self._certificates.is_valid(one):
                return one
        raise unknown_token()

    def _bind(self, request: JoinRequest, name: str) -> WorkerBinding:
        """The binding of a worker's id and GPUs to its name.

        Raises:
            FleetError: A refusal of :meth:`WorkerBindings.check` or of :meth:`Registry.check_unique`.
        """
        bindings, registry, worker_id = self._fleet.bindings, self._fleet.registry, request.worker_id
        bindings.check(name, worker_id, request.gpu_uuids)
        check_own_id(registry, name, worker_id)
        gpus = [Gpu(uuid=uuid) for uuid in request.gpu_uuids]
        registry.check_unique(Hello(worker_id=worker_id, name=name, gpus=gpus), time.monotonic())
        before = bindings.get(name)
        epoch = max(request.last_epoch, before.epoch if before is not None else 0)
        return WorkerBinding(name, worker_id, frozenset(request.gpu_uuids), epoch)

    async def renew(self, request: RenewCertificateRequest, caller: Caller) -> RenewCertificateResponse:
        """Issues the next certificate of a caller, or the same certificate again.

        Raises:
            FleetError: UNAUTHENTICATED, NOT_PERMITTED, INVALID_ARGUMENT, WRONG_STATE, CERTIFICATE_CLONED or
                STORAGE_UNAVAILABLE.
        """
        issued = await self._fleet.store.health.unless_stalled(self._renew(request, caller))
        return RenewCertificateResponse(certificate=self._message(issued))

    async def _renew(self, request: RenewCertificateRequest, caller: Caller) -> ClientCertificate:
        async with self._fleet.enrolling:
            if (refusal := self._certificates.refusal(caller)) is not None:  # meanwhile
                raise refusal
            registry = self._certificates.registry
            present = registry.get(caller.serial)
            if present is None:
                raise FleetError(
                    errors_pb2.ERROR_REASON_NOT_PERMITTED,
                    f"{caller.identity} did not call with a certificate of the coordinator's authority, and "
                    "only that can be renewed",
                )
            key = read_csr(request.csr).key
            for successor in registry.successors(present.serial):
                if certificate_key_digest(successor.der) == key_digest(key):
                    return successor
                raise self._clone(present, caller)
            if (due := _renewable_from(present)) > self._fleet.store.highest_time_ns:
                raise FleetError(
                    errors_pb2.ERROR_REASON_WRONG_STATE,
                    f"the certificate of {present.identity} can be renewed from "
                    f"{timestamp(due).ToJsonString()} on: renew it then",
                )
            return await self._certificates.issue(
                key,
                present.identity,
                predecessor=present.serial,
                rows=call_rows(caller, RENEW, request, str(present.identity)),
            )

    def _clone(self, present: ClientCertificate, caller: Caller) -> FleetError:
        error = FleetError(
            errors_pb2.ERROR_REASON_CERTIFICATE_CLONED,
            f"the certificate {present.serial} of {present.identity} was renewed before with another key, so "
            "two hosts have it: find the copy, then join again with a token of `leasehold token create "
            f"--{present.identity.kind} {present.identity.name} --replace`",
        )
        if self._fleet.refusals.may_tell_host(caller.address):
            logger.warning("refused a renewal: %s", error.message)
            self._fleet.events.join_refused(str(present.identity), error)
        return error

    def _message(self, issued: ClientCertificate) -> IssuedCertificate:
        return IssuedCertificate(
            certificate=issued.der,
            ca_certificates=self._authorities(),
            renew_time=timestamp(_time_of_life_ns(issued, random.uniform(*RENEW_AT))),
        )


def _time_of_life_ns(certificate: ClientCertificate, part: float) -> int:
    """When a part of a certificate's life is over, in nanoseconds of the Unix epoch."""
    begin = certificate.not_before + CLOCK_DIFFERENCE
    moment = begin + (certificate.not_after - begin) * part
    return int(moment.timestamp() * 1e9)


def _renewable_from(certificate: ClientCertificate) -> int:
    return _time_of_life_ns(certificate, RENEW_FROM)
