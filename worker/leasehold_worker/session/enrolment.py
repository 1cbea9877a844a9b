"""Enrolment: the worker's first certificate for a join token, and the renewal of its certificate.

The worker stores a new key before it sends a request for the key. After a crash or a lost answer, a new
request with the same key gets the same certificate. A request for another key looks like that of a clone.
"""

import base64
import hashlib
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar, cast

import grpc
import msgspec
from google.protobuf.message import DecodeError
from leasehold.v1.enrolment_service_pb2 import (
    IssuedCertificate,
    JoinRequest,
    JoinTicket,
    RenewCertificateRequest,
)
from leasehold.v1.enrolment_service_pb2_grpc import JoinServiceStub, RenewalServiceStub

from leasehold_worker.errors import StartError
from leasehold_worker.files.enrolment_file import Enrolment
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.session.channel import OPTIONS, open_enrolled_channel
from leasehold_worker.session.client_keys import (
    as_pem,
    new_key,
    require_valid,
    serial_numbers,
    signing_request,
)
from leasehold_worker.session.tls_failures import explain

logger = logging.getLogger(__name__)

TICKET_PREFIX: Final = "leasehold-join-"
TICKET_LIMIT: Final = 65_536
"""Most characters of a join token."""

AUTHORITY_LIMIT: Final = 8
"""Most authorities of a coordinator."""

CALL_TIMEOUT_S: Final = 20.0

JOIN_OPTIONS: Final = (*OPTIONS, ("grpc.enable_retries", 0))
"""gRPC repeats no join by itself: it would send the same certificate request again."""

WORKER_KIND: Final = "worker"

Answer = TypeVar("Answer")


class RefusedError(Exception):
    """A join or a renewal failed. The text has the reason and the remedy.

    Attributes:
        is_final: Whether the coordinator refused, so that another attempt is refused too.
    """

    def __init__(self, text: str, *, is_final: bool) -> None:
        super().__init__(text)
        self.is_final = is_final


def read_ticket(text: str) -> JoinTicket:
    """The ticket in a join token.

    Raises:
        StartError: The text is no join token for a worker.
    """
    word = text.strip()
    begins = word.startswith(TICKET_PREFIX) and len(word) <= TICKET_LIMIT
    data = word.removeprefix(TICKET_PREFIX)
    try:
        ticket = JoinTicket.FromString(base64.b64decode(data + "=" * (-len(data) % 4), b"-_", validate=True))
        as_pem(ticket.ca_certificates)
    except (ValueError, DecodeError):
        ticket = JoinTicket()
    if not (begins and ticket.address and ticket.secret and ticket.ca_certificates):
        problem = "it is incomplete or damaged" if begins else f"it does not begin with {TICKET_PREFIX}"
        raise StartError(
            f"what was given is no join token ({problem}): copy the whole word that `leasehold token create "
            "--worker NAME` prints"
        )
    if not ticket.identity.startswith(f"{WORKER_KIND}/"):
        raise StartError(
            f"the join token is for {ticket.identity}, and not for a worker: use `leasehold login` with it, "
            "or create one with `leasehold token create --worker NAME`"
        )
    return ticket


def ticket_name(ticket: JoinTicket) -> str:
    """The name in a ticket. Empty: the ticket has a pattern."""
    name = ticket.identity.partition("/")[2]
    return "" if set(name) & set("*?") else name


def join(ticket: JoinTicket, state_directory: StateDirectory, name: str, gpu_uuids: Sequence[str]) -> None:
    """Gets the worker's first certificate, and stores it.

    Does nothing if this ticket was used before. A ticket with a pattern can't replace a valid certificate, so
    a worker with one does not use such a ticket: hosts may share a file with the token for new hosts.

    Args:
        ticket: The ticket of a join token.
        state_directory: Keeps the key and the certificate.
        name: The worker's name.
        gpu_uuids: UUIDs of the worker's GPUs.

    Raises:
        StartError: The coordinator refused or does not answer, or the answer can't be stored.
    """
    try:
        _join(ticket, state_directory, f"{WORKER_KIND}/{name}", gpu_uuids)
    except RefusedError as error:
        raise StartError(f"{WORKER_KIND}/{name} can't join: {error}") from None
    except OSError as error:
        raise StartError(
            f"the certificate can't be stored ({error.strerror}): check the state directory's disk"
        ) from error


def _join(
    ticket: JoinTicket, state_directory: StateDirectory, identity: str, gpu_uuids: Sequence[str]
) -> None:
    """Joins as an identity, unless the ticket was used or is needless.

    Raises:
        RefusedError: The coordinator refused or does not answer.
        OSError: The key or the certificate can't be stored.
    """
    digest = hashlib.sha256(ticket.secret).hexdigest()
    enrolment = state_directory.enrolment() or Enrolment()
    if enrolment.ticket_digest == digest or _is_needless(ticket, enrolment, identity):
        return
    if enrolment.next_ticket != digest:
        enrolment = msgspec.structs.replace(enrolment, next_key=new_key(), next_ticket=digest)
    request = JoinRequest(
        secret=ticket.secret,
        identity=identity,
        csr=signing_request(enrolment.next_key),
        worker_id=state_directory.worker_id(),
        gpu_uuids=gpu_uuids,
        last_epoch=state_directory.last_epoch(),
    )
    state_directory.save_enrolment(enrolment)
    credentials = grpc.ssl_channel_credentials(as_pem(ticket.ca_certificates).encode())
    with grpc.secure_channel(ticket.address, credentials, options=JOIN_OPTIONS) as channel:
        stub = JoinServiceStub(channel)
        response = _call(lambda: stub.Join(request, timeout=CALL_TIMEOUT_S), ticket.address)
    joined = msgspec.structs.replace(
        _with_certificate(enrolment, response.certificate),
        identity=identity,
        coordinator=response.coordinator,
        ticket_digest=digest,
    )
    state_directory.save_enrolment(joined)
    logger.info("%s has joined; the certificate is in the state directory", identity)


def _is_needless(ticket: JoinTicket, enrolment: Enrolment, identity: str) -> bool:
    """Whether the ticket has a pattern, and the worker a valid certificate of the same coordinator."""
    if ticket_name(ticket) or enrolment.identity != identity:
        return False
    try:
        require_valid(enrolment)
    except StartError:
        return False
    return any(as_pem([one]) in enrolment.authorities for one in ticket.ca_certificates)


def renew(state_directory: StateDirectory, coordinator: str) -> None:
    """Renews the worker's certificate, and stores the new one.

    Raises:
        RefusedError: The coordinator refused or does not answer.
        OSError: The key or the certificate can't be stored.
        StartError: The stored enrolment is damaged.
    """
    enrolment = state_directory.enrolment()
    if enrolment is None:
        return
    if not enrolment.next_key or enrolment.next_ticket:
        enrolment = state_directory.change_enrolment(
            lambda present: msgspec.structs.replace(present, next_key=new_key(), next_ticket="")
        )
    request = RenewCertificateRequest(csr=signing_request(enrolment.next_key))
    with open_enrolled_channel(coordinator, enrolment) as channel:
        response = _call(
            lambda: RenewalServiceStub(channel).RenewCertificate(request, timeout=CALL_TIMEOUT_S), coordinator
        )
    state_directory.change_enrolment(lambda present: _with_certificate(present, response.certificate))
    logger.info("renewed the certificate of %s", enrolment.identity)


def keep_authorities(state_directory: StateDirectory, certificates: Sequence[bytes]) -> list[str]:
    """Stores the certificates by which the coordinator is verified from the next connection on.

    Args:
        state_directory: Keeps the worker's certificate.
        certificates: The certificates, in DER.

    Returns:
        Their serial numbers, in hexadecimal. Empty: the worker has not joined, and keeps its own files.

    Raises:
        OSError: They can't be stored.
        StartError: The stored enrolment is damaged.
        ValueError: They are no certificates, or too many.
    """
    enrolment = state_directory.enrolment()
    if enrolment is None or not enrolment.certificate:
        return []
    if not 0 < len(certificates) <= AUTHORITY_LIMIT:
        raise ValueError(f"{len(certificates)} authorities are sent, and 1 to {AUTHORITY_LIMIT} are possible")
    authorities = as_pem(certificates)
    if enrolment.authorities != authorities:
        state_directory.change_enrolment(
            lambda present: msgspec.structs.replace(present, authorities=authorities)
        )
    return serial_numbers(certificates)


def _with_certificate(enrolment: Enrolment, issued: IssuedCertificate) -> Enrolment:
    """The enrolment with the certificate for its next key.

    Raises:
        RefusedError: The answer has no valid certificates.
    """
    try:
        certificate, authorities = as_pem([issued.certificate]), as_pem(issued.ca_certificates)
    except ValueError as error:
        raise RefusedError(f"the coordinator sent no valid certificate ({error})", is_final=False) from None
    return msgspec.structs.replace(
        enrolment,
        key=enrolment.next_key,
        next_key="",
        next_ticket="",
        certificate=certificate,
        authorities=authorities or enrolment.authorities,
        renew_s=issued.renew_time.ToNanoseconds() / 1e9,
    )


def _call(call: Callable[[], Answer], address: str) -> Answer:
    """Makes a call.

    Raises:
        RefusedError: It failed.
    """
    try:
        return call()
    except grpc.RpcError as error:
        status = cast("grpc.Call", error)  # every error of a stub is its call too
        code, details = status.code(), status.details() or ""
        why = explain(f"{code.name}: {details}", address)
        if why is None and code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            why = f"no coordinator answers at {address} ({details})"
        final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
        raise RefusedError(why or details, is_final=code in final) from None
