"""A join whose answer is lost: each attempt signs a new request with the same key, and gRPC repeats none."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from leasehold.v1.enrolment_service_pb2 import JoinRequest, JoinResponse, JoinTicket
from leasehold.v1.enrolment_service_pb2_grpc import (
    JoinServiceServicer,
    add_JoinServiceServicer_to_server,
)
from leasehold_client.coordinator.login import login
from leasehold_client.errors import LeaseholdError
from leasehold_coordinator.access.authority import LOOPBACK_NAMES, open_authority
from leasehold_worker.errors import StartError
from leasehold_worker.files.state_directory import StateDirectory
from leasehold_worker.session import enrolment

ATTEMPTS = 3


class Losing(JoinServiceServicer):
    """Receives joins, and loses every answer."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []

    def Join(self, request: JoinRequest, context: grpc.ServicerContext) -> JoinResponse:
        self.requests.append(request.csr)
        context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        raise AssertionError


@contextmanager
def losing(folder: Path, identity: str) -> Iterator[tuple[Losing, JoinTicket]]:
    """A listener for enrolment that loses every answer, and a ticket for it."""
    service, authority = Losing(), open_authority(folder)
    own = authority.issue_server(LOOPBACK_NAMES)
    server = grpc.server(ThreadPoolExecutor(2))
    add_JoinServiceServicer_to_server(service, server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(own.key, own.chain)]))
    server.start()
    try:
        yield (
            service,
            JoinTicket(
                address=f"localhost:{port}",
                ca_certificates=[authority.certificate.public_bytes(Encoding.DER)],
                secret=b"x" * 32,
                identity=identity,
            ),
        )
    finally:
        server.stop(None)


def join_worker(ticket: JoinTicket, folder: Path) -> None:
    """One attempt of a worker, which was started again."""
    with pytest.raises(StartError, match="the answer is lost"):
        enrolment.join(ticket, StateDirectory(folder), "alpha", [])


def log_in(ticket: JoinTicket, folder: Path) -> None:
    """One attempt of a user."""
    with pytest.raises(LeaseholdError, match="the answer is lost"):
        login(ticket, "", "")


@pytest.mark.parametrize(("identity", "attempt"), [("worker/alpha", join_worker), ("user/alice", log_in)])
def test_each_attempt_signs_anew_with_the_same_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    identity: str,
    attempt: Callable[[JoinTicket, Path], None],
) -> None:
    folders = [tmp_path / name for name in ("authority", "state")]
    for folder in folders:
        folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folders[1]))
    with losing(folders[0], identity) as (service, ticket):
        for count in range(1, ATTEMPTS + 1):
            attempt(ticket, folders[1])
            assert len(service.requests) == count, "gRPC repeats nothing"
    requests = [x509.load_der_x509_csr(csr) for csr in service.requests]
    keys = {
        one.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo) for one in requests
    }
    assert len(keys) == 1
    assert len({one.tbs_certrequest_bytes for one in requests}) == ATTEMPTS
