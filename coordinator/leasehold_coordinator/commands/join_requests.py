"""The requests of joins and renewals: what is read from them, and why they are refused. Pure."""

from typing import Final

from leasehold.v1 import errors_pb2
from leasehold.v1.enrolment_service_pb2 import JoinRequest

from leasehold_coordinator.access.identities import Identity, Kind, parse_identity
from leasehold_coordinator.access.join_tokens import StoredJoinToken
from leasehold_coordinator.access.signing_requests import SigningRequest, read_request
from leasehold_coordinator.core.field_rules import GPU_LIMIT
from leasehold_coordinator.core.hello_rules import check_id, check_name
from leasehold_coordinator.core.worker_registry import EPOCH_JUMP_LIMIT
from leasehold_coordinator.errors import FleetError, invalid

REQUEST_LIMIT: Final = 16
"""Most certificate requests of one key by one join token: the first one, and those after lost answers."""


def unknown_token() -> FleetError:
    """The one refusal of every secret that is not valid."""
    return FleetError(
        errors_pb2.ERROR_REASON_JOIN_REFUSED,
        "the join token is unknown, expired or used up: create another one with `leasehold token create`",
    )


def replayed(identity: Identity) -> FleetError:
    """The refusal of a recorded request, or of a client that sends the same bytes again."""
    return FleetError(
        errors_pb2.ERROR_REASON_JOIN_REFUSED,
        f"the certificate request of {identity} was sent before, and each one is accepted once: join again, "
        "which signs a new request with the same key",
    )


def exhausted(identity: Identity) -> FleetError:
    """The refusal of a key above :data:`REQUEST_LIMIT`."""
    return FleetError(
        errors_pb2.ERROR_REASON_JOIN_REFUSED,
        f"the key of {identity} has sent {REQUEST_LIMIT} certificate requests with this join token, which is "
        f"the limit: create another one with `leasehold token create --{identity.kind} {identity.name} "
        "--replace`",
    )


def read_join(request: JoinRequest, token: StoredJoinToken) -> tuple[Identity, SigningRequest]:
    """The identity and the certificate request of a join with a valid secret.

    Raises:
        FleetError: INVALID_ARGUMENT, or IDENTITY_MISMATCH.
    """
    try:
        identity = parse_identity(request.identity)
    except ValueError as error:
        raise invalid("identity", str(error)) from error
    if not token.permits(identity):
        raise FleetError(
            errors_pb2.ERROR_REASON_IDENTITY_MISMATCH,
            f"the join token is for {token.token.identity}, and not for {identity}: use its own token",
        )
    if identity.kind is Kind.WORKER:
        check_name(identity.name)
        check_id("worker_id", request.worker_id)
        if len(request.gpu_uuids) > GPU_LIMIT:
            raise invalid(
                "gpu_uuids", f"{len(request.gpu_uuids)} GPUs are too many: send at most {GPU_LIMIT}"
            )
        for uuid in request.gpu_uuids:
            check_id("gpu_uuids", uuid)
        if request.last_epoch > EPOCH_JUMP_LIMIT:
            raise invalid("last_epoch", f"epoch {request.last_epoch} is impossible: send the real one")
    return identity, read_csr(request.csr)


def read_csr(csr: bytes) -> SigningRequest:
    """Reads a certificate request.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    try:
        return read_request(csr)
    except ValueError as error:
        raise invalid("csr", f"the certificate signing request is not valid: {error}") from error
