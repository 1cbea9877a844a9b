"""Each failure of TLS is told with its cause and its remedy, by client and worker alike."""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from leasehold_client.coordinator import tls_failures as clients
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_coordinator.access import authority as authorities
from leasehold_coordinator.access.authority import LOOPBACK_NAMES, IssueRules
from leasehold_coordinator.server.transport import ServerTls, open_state
from leasehold_worker.session import tls_failures as workers

from tests.ports import free_port

HOUR = datetime.timedelta(hours=1)
EXPIRED = "UNAVAILABLE: failed to connect to all addresses; last error: certificate has expired: OK"


@contextmanager
def serving(credentials: grpc.ServerCredentials | None) -> Iterator[str]:
    """The address of a server."""
    server = grpc.server(ThreadPoolExecutor(1))
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory, which clients have as their credentials."""
    open_state(tmp_path / "state")
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", str(tmp_path / "state"))
    return tmp_path / "state"


def credentials(state: Path, names: tuple[str, ...] = LOOPBACK_NAMES) -> grpc.ServerCredentials:
    """Credentials of a coordinator with this state directory."""
    return ServerTls(open_state(state)[0], frozenset(names)).credentials()


def told(address: str) -> str:
    """What a client says about a coordinator."""
    with Client(address) as client, pytest.raises(LeaseholdError) as error:
        client.workers()
    assert not isinstance(error.value, NoCoordinatorError), "another attempt would fail too"
    return error.value.message.partition(" failed: ")[2]


def test_another_authority(state: Path, tmp_path: Path) -> None:
    with serving(credentials(tmp_path / "other")) as address:
        assert told(address).startswith("its certificate is not from the authority in ca.pem")


def test_another_name(state: Path) -> None:
    with serving(credentials(state, ("other.example",))) as address:
        assert told(address).startswith("its certificate does not name that host")


def test_an_expired_certificate(state: Path) -> None:
    expired = IssueRules(server_life=datetime.timedelta(minutes=-1))
    server = ServerTls(open_state(state, expired)[0], frozenset(LOOPBACK_NAMES))
    with serving(server.credentials()) as address:
        assert told(address).startswith("its certificate has expired 1 minute ago, or this host's clock")
        assert " 1 minute ago, or " in (workers.explain(EXPIRED, address) or "")


def test_a_certificate_of_the_future(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authorities, "CLOCK_DIFFERENCE", datetime.timedelta(hours=-1))
    with serving(credentials(state)) as address:
        assert told(address).startswith("its certificate is not valid yet for another 59 minutes: this")


def test_a_server_without_tls(state: Path) -> None:
    with serving(None) as address:
        assert told(address).startswith("the server does not speak TLS: correct the port, or")


@pytest.mark.usefixtures("short_outages")
def test_nobody_there_is_no_failure_of_tls(state: Path) -> None:
    with Client(f"127.0.0.1:{free_port()}") as client, pytest.raises(NoCoordinatorError):
        client.workers()


def test_workers_know_the_same_causes() -> None:
    assert list(workers._CAUSES) == list(clients._CAUSES)
    for text in workers._CAUSES:
        details = f"failed to connect to all addresses; last error: {text}: OK"
        assert (clients.explain(details, "gpu:1") or "").startswith("TLS with gpu:1 failed: ")
        told = workers.explain(f"UNAVAILABLE: {details}", "gpu:1") or ""
        assert told.startswith("TLS with gpu:1 failed: ")
        assert clients.explain(f"no workload is named {text}", "gpu:1") is None
        assert workers.explain(f"UNAVAILABLE: refused {text}", "gpu:1") is None


def write_certificate(folder: Path, age: datetime.timedelta, usage: x509.ObjectIdentifier) -> Path:
    """Writes ``client.pem`` and ``client.key``, which end one hour before an age.

    Returns:
        The certificate's file.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "of another PKI")])
    end = datetime.datetime.now(datetime.UTC) - age
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(end - datetime.timedelta(hours=1)).not_valid_after(end)
    builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    (folder / "client.pem").write_bytes(pem)
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "client.key").write_bytes(key_pem)
    return folder / "client.pem"


@pytest.mark.usefixtures("short_outages")
@pytest.mark.parametrize(
    ("age", "usage", "expected"),
    [
        (
            HOUR * 2,
            ExtendedKeyUsageOID.CLIENT_AUTH,
            "client.pem has expired 2 hours ago: replace it",
        ),
        pytest.param(
            -HOUR * 3.5,
            ExtendedKeyUsageOID.CLIENT_AUTH,
            "client.pem is not valid for another 2 hours",
            marks=pytest.mark.long,
        ),
        pytest.param(
            -HOUR / 2,
            ExtendedKeyUsageOID.SERVER_AUTH,
            "client.pem is not for clients: get one",
            marks=pytest.mark.long,
        ),
        pytest.param(
            -HOUR / 2,
            ExtendedKeyUsageOID.CLIENT_AUTH,
            "as a coordinator does that requires a client certificate of its own authority: ",
            marks=pytest.mark.long,
        ),
    ],
    ids=["expired", "early", "server", "other"],
)
def test_a_client_certificate_that_the_server_refuses(
    state: Path, age: datetime.timedelta, usage: x509.ObjectIdentifier, expected: str
) -> None:
    path = write_certificate(state, age, usage)
    authority = open_state(state)[0].newest
    pair = authority.issue_server(LOOPBACK_NAMES)
    required = grpc.ssl_server_credentials(
        [(pair.key, pair.chain)], root_certificates=authority.pem, require_client_auth=True
    )
    with serving(required) as address:
        with Client(address) as client, pytest.raises(NoCoordinatorError) as error:
            client.workers()
        assert f"{address} ended the TLS handshake" in error.value.message
        assert expected in error.value.message
        is_other = "requires a client certificate" in expected
        assert ("on the coordinator's host, leave out --coordinator" in error.value.message) == is_other
        assert ("or name its socket by --coordinator unix:PATH; elsewhere" in error.value.message) == is_other
    closed = "UNAVAILABLE: failed to connect to all addresses; last error: Socket closed"
    assert expected in (workers.explain_closed(closed, address, path) or "")
