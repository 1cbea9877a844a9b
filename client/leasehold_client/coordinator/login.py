"""The first certificate of a user or a service, by a join token, and the renewal of a certificate.

A new key is stored before a request for it is sent. After a lost answer, a new request with the same key gets
the same certificate. A request for another key would look like that of a thief.
"""

import base64
import hashlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, TypeVar, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import AttributeOID
from google.protobuf.message import DecodeError
from leasehold.v1.access_service_pb2 import WhoAmIRequest
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold.v1.enrolment_service_pb2 import (
    IssuedCertificate,
    JoinRequest,
    JoinTicket,
    RenewCertificateRequest,
)
from leasehold.v1.enrolment_service_pb2_grpc import JoinServiceStub, RenewalServiceStub

from leasehold_client.contexts import Context, locked_contexts, read_contexts
from leasehold_client.coordinator.renewing_channel import context_credentials
from leasehold_client.coordinator.tls_failures import explain
from leasehold_client.errors import LeaseholdError, UsageError, decode_error

TICKET_PREFIX: Final = "leasehold-join-"
TICKET_LIMIT: Final = 65_536
"""Most characters of a join token."""

CALL_TIMEOUT_S: Final = 10.0
NONCE_BYTES: Final = 16
UNREACHABLE: Final = (
    "the address is that of the token: check that the coordinator's listener for joins (--join-listen) is "
    "reachable from this host, or ask an admin for another token"
)
"""The remedy of a login without an answer, which has no option for the address."""

NOT_ANSWERED: Final = (
    "the token was used before, and the coordinator must accept its certificate: check that the coordinator "
    "runs and is reachable from this host"
)
"""The remedy of a login with a used token without an answer."""

MAY_BE_STORED: Final = ("", "STORAGE_UNAVAILABLE", "CALL_TIMEOUT", "INTERNAL")
"""Reasons of a failed join that may be stored all the same, for the key of its request. Empty: no answer."""

OPTIONS: Final = (("grpc.enable_retries", 0),)
"""gRPC repeats no join by itself: it would send the same certificate request again."""

Answer = TypeVar("Answer")


def read_ticket(text: str) -> JoinTicket:
    """The ticket in a join token.

    Raises:
        UsageError: The text is no join token for a user or a service.
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
        raise UsageError(
            f"what was given is no join token ({problem}): copy the whole word that `leasehold token create "
            "--user NAME` prints"
        )
    if ticket.identity.startswith("worker/"):
        raise UsageError(
            f"the join token is for {ticket.identity}: use it on the GPU host, with `leasehold worker --join "
            "-`"
        )
    return ticket


def login(ticket: JoinTicket, name: str, context_name: str) -> Context:
    """Gets a first certificate, stores it in a context, and makes the context current.

    A used token gets no other certificate. The coordinator must accept that of the context.

    Args:
        ticket: The ticket of a join token.
        name: The name of the user or service, if the ticket has a pattern. Empty: that of the ticket.
        context_name: The name of the context. Empty: that of the user or service.

    Raises:
        UsageError: The name is missing, or the context belongs to somebody else.
        LeaseholdError: The coordinator refused or does not answer.
    """
    kind, _, pattern = ticket.identity.partition("/")
    if not name and set(pattern) & set("*?"):
        raise UsageError(f"the join token is for {ticket.identity}: name yourself with --name")
    identity = f"{kind}/{name or pattern}"
    context_name = context_name or name or pattern
    digest = hashlib.sha256(ticket.secret).hexdigest()
    with locked_contexts() as write:
        contexts = read_contexts()
        context = contexts.by_name.get(context_name, Context(context_name, identity))
        if context.identity != identity:
            raise UsageError(
                f"the context {context_name} is for {context.identity}, and the token for {identity}: choose "
                "another name with --context"
            )
        if context.certificate and not _share_authority(context.authorities, ticket):
            raise UsageError(
                f"the context {context_name} is for {context.coordinator}, which has another authority than "
                "the coordinator of the token: choose another name with --context, or first `leasehold "
                f"context delete {context_name}`"
            )
        if context.certificate and context.ticket_digest == digest:  # the same token again
            _require_accepted(context)
            write(replace(contexts, current=context_name))
            return context
        if context.next_ticket != digest:
            context = replace(context, next_key=new_key(), next_ticket=digest)
        write(contexts.put(context))
        request = JoinRequest(secret=ticket.secret, identity=identity, csr=signing_request(context.next_key))
        credentials = grpc.ssl_channel_credentials(as_pem(ticket.ca_certificates).encode())
        try:
            with grpc.secure_channel(ticket.address, credentials, options=OPTIONS) as channel:
                response = _call(
                    lambda: JoinServiceStub(channel).Join(request, timeout=CALL_TIMEOUT_S),
                    ticket.address,
                    UNREACHABLE,
                )
        except LeaseholdError as error:
            if error.reason not in MAY_BE_STORED:  # otherwise the next login repeats the request
                write(contexts)
            raise
        context = replace(
            _with_certificate(context, response.certificate),
            coordinator=response.coordinator,
            ticket_digest=digest,
        )
        write(replace(contexts.put(context), current=context_name))
    return context


def _require_accepted(context: Context) -> None:
    """Requires that the coordinator accepts the certificate of a context.

    Raises:
        LeaseholdError: The certificate has expired, or the coordinator refuses it or does not answer.
    """
    context.require_valid()
    with grpc.secure_channel(context.coordinator, context_credentials(context), options=OPTIONS) as channel:
        _call(
            lambda: AccessServiceStub(channel).WhoAmI(WhoAmIRequest(), timeout=CALL_TIMEOUT_S),
            context.coordinator,
            NOT_ANSWERED,
        )


def _share_authority(authorities: str, ticket: JoinTicket) -> bool:
    """Whether a ticket is of a coordinator that some of these certificates, as PEM, verify.

    Raises:
        UsageError: The certificates are damaged.
    """
    try:
        parsed = x509.load_pem_x509_certificates(authorities.encode())
    except ValueError as error:
        raise UsageError(
            f"the authorities of the context are damaged ({error}): delete the context"
        ) from None
    known = {one.fingerprint(hashes.SHA256()) for one in parsed}
    given = map(x509.load_der_x509_certificate, ticket.ca_certificates)
    return any(one.fingerprint(hashes.SHA256()) in known for one in given)


def renew(name: str, certificate: str) -> Context:
    """Renews the certificate of a context, unless another process has done so, and stores the new one.

    Args:
        name: The context.
        certificate: The certificate that is due.

    Raises:
        LeaseholdError: The coordinator refused or does not answer, or the contexts can't be changed.
    """
    with locked_contexts() as write:
        contexts = read_contexts()
        context = contexts.get(name)
        if context.certificate != certificate:
            return context
        if not context.next_key or context.next_ticket:
            context = replace(context, next_key=new_key(), next_ticket="")
            write(contexts.put(context))
        request = RenewCertificateRequest(csr=signing_request(context.next_key))
        with grpc.secure_channel(context.coordinator, context_credentials(context)) as channel:
            response = _call(
                lambda: RenewalServiceStub(channel).RenewCertificate(request, timeout=CALL_TIMEOUT_S),
                context.coordinator,
            )
        context = _with_certificate(context, response.certificate)
        write(contexts.put(context))
    return context


def new_key() -> str:
    """A new private key on the curve P-256, as PEM."""
    return (
        ec.generate_private_key(ec.SECP256R1())
        .private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        .decode("ascii")
    )


def signing_request(key: str) -> bytes:
    """A new certificate signing request in DER. It proves the possession of the key, and has no name.

    Each request has a random nonce, since the coordinator accepts a request of a join only once.

    Raises:
        UsageError: The key is damaged.
    """
    try:
        loaded = serialization.load_pem_private_key(key.encode(), password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("it is not on an elliptic curve")  # noqa: TRY004 - as for a malformed key
    except ValueError as error:
        raise UsageError(f"a key of the contexts is damaged ({error}): delete the context") from None
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    nonce = secrets.token_hex(NONCE_BYTES).encode()
    request = request.add_attribute(AttributeOID.UNSTRUCTURED_NAME, nonce)
    return request.sign(loaded, hashes.SHA256()).public_bytes(Encoding.DER)


def as_pem(certificates: Iterable[bytes]) -> str:
    """Certificates in DER as one text.

    Raises:
        ValueError: One is malformed.
    """
    parsed = [x509.load_der_x509_certificate(certificate) for certificate in certificates]
    return "".join(one.public_bytes(Encoding.PEM).decode("ascii") for one in parsed)


def _with_certificate(context: Context, issued: IssuedCertificate) -> Context:
    """The context with the certificate for its next key.

    Raises:
        LeaseholdError: The answer has no valid certificates.
    """
    try:
        parsed = x509.load_der_x509_certificate(issued.certificate)
        authorities = as_pem(issued.ca_certificates)
    except ValueError as error:
        raise LeaseholdError(f"the coordinator sent no valid certificate ({error}): update it") from None
    return replace(
        context,
        key=context.next_key,
        next_key="",
        next_ticket="",
        certificate=parsed.public_bytes(Encoding.PEM).decode("ascii"),
        authorities=authorities or context.authorities,
        begin_s=parsed.not_valid_before_utc.timestamp(),
        expire_s=parsed.not_valid_after_utc.timestamp(),
        renew_s=issued.renew_time.ToNanoseconds() / 1e9,
    )


def _call(call: Callable[[], Answer], address: str, remedy: str = "") -> Answer:
    """Makes a call. The remedy is for an address at which no coordinator answers.

    Raises:
        LeaseholdError: It failed.
    """
    try:
        return call()
    except grpc.RpcError as error:
        failure = explain(cast("grpc.Call", error).details() or "", address)
        if failure is not None:
            raise LeaseholdError(failure, code=grpc.StatusCode.UNAVAILABLE) from None
        raise decode_error(error, address, remedy) from None
