"""A coordinator that renews certificates as a test says. It also has a list and a watch."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from google.protobuf.message import Message
from leasehold.v1.enrolment_service_pb2 import (
    IssuedCertificate,
    RenewCertificateRequest,
    RenewCertificateResponse,
)
from leasehold.v1.fleet_service_pb2 import (
    ListWorkersRequest,
    ListWorkersResponse,
    WatchFleetRequest,
    WatchFleetResponse,
)
from leasehold.v1.watch_pb2 import Bookmark
from leasehold_coordinator.access.authority import LOOPBACK_NAMES, open_authority
from leasehold_coordinator.access.identities import parse_identity

from tests.certificates import Holder, issue
from tests.client.scripted_coordinator import refuse

WATCH_LIMIT_S = 3.0
IN_A_MONTH = datetime.now(UTC) + timedelta(days=30)


@dataclass
class Renewals:
    """Issues certificates for what it is asked, and remembers the keys."""

    folder: Path
    address: str = ""
    keys: list[bytes] = field(default_factory=list)
    """The public keys of requests."""
    losing: int = 0
    """How many answers are lost from now on."""
    refusing: bool = False
    renew_time: datetime = IN_A_MONTH
    """When the issued certificates are due."""
    callers: list[str] = field(default_factory=list)
    """The serial numbers of the certificates of calls."""

    watch_end: threading.Event = field(default_factory=threading.Event)
    """Ends the last watch, as the expiry of its certificate does."""

    def __post_init__(self) -> None:
        self.authority = open_authority(self.folder)

    def issue(self, identity: str) -> Holder:
        """A certificate that is due."""
        return issue(self.authority, identity)

    def renew(
        self, request: RenewCertificateRequest, context: grpc.ServicerContext
    ) -> RenewCertificateResponse:
        """Serves RenewCertificate."""
        if self.refusing:
            _end(context, grpc.StatusCode.PERMISSION_DENIED, "two hosts have the certificate")
        key = x509.load_der_x509_csr(request.csr).public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        self.keys.append(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo))
        if self.losing:
            self.losing -= 1
            _end(context, grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        issued = self.authority.issue_client(key, parse_identity("user/alice"))
        answer = IssuedCertificate(
            certificate=issued.der, ca_certificates=[self.authority.certificate.public_bytes(Encoding.DER)]
        )
        answer.renew_time.FromDatetime(self.renew_time)
        return RenewCertificateResponse(certificate=answer)

    def list_workers(self, request: ListWorkersRequest, context: grpc.ServicerContext) -> ListWorkersResponse:
        """Serves ListWorkers, and notes the certificate of the caller."""
        self._note(context)
        return ListWorkersResponse()

    def watch_fleet(
        self, request: WatchFleetRequest, context: grpc.ServicerContext
    ) -> Iterator[WatchFleetResponse]:
        """Serves WatchFleet, and notes the certificate of the caller. Sends one bookmark."""
        self._note(context)
        self.watch_end = end = threading.Event()
        context.add_callback(end.set)
        yield WatchFleetResponse(bookmark=Bookmark(), resume_token="1")
        end.wait(WATCH_LIMIT_S)
        refuse(context, grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED", "the certificate expired")

    def _note(self, context: grpc.ServicerContext) -> None:
        (pem,) = cast("Sequence[bytes]", context.auth_context()["x509_pem_cert"])
        self.callers.append(f"{x509.load_pem_x509_certificate(pem).serial_number:x}")


def _end(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError


def _handler(serve: Any, kind: type[Message]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        serve, kind.FromString, lambda answer: answer.SerializeToString()
    )


@contextmanager
def serving_renewals(folder: Path) -> Iterator[Renewals]:
    """A server that requires client certificates."""
    renewals = Renewals(folder)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (
            grpc.method_handlers_generic_handler(
                "leasehold.v1.RenewalService",
                {"RenewCertificate": _handler(renewals.renew, RenewCertificateRequest)},
            ),
            grpc.method_handlers_generic_handler(
                "leasehold.v1.FleetService",
                {
                    "ListWorkers": _handler(renewals.list_workers, ListWorkersRequest),
                    "WatchFleet": grpc.unary_stream_rpc_method_handler(
                        renewals.watch_fleet,
                        WatchFleetRequest.FromString,
                        lambda answer: answer.SerializeToString(),
                    ),
                },
            ),
        )
    )
    own = renewals.authority.issue_server(LOOPBACK_NAMES)
    roots = renewals.authority.certificate.public_bytes(Encoding.PEM)
    credentials = grpc.ssl_server_credentials([(own.key, own.chain)], roots, require_client_auth=True)
    renewals.address = f"localhost:{server.add_secure_port('127.0.0.1:0', credentials)}"
    server.start()
    try:
        yield renewals
    finally:
        server.stop(None)
