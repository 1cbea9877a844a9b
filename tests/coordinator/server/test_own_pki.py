"""A coordinator with certificates of a PKI of others."""

import base64
import datetime
import signal
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID
from leasehold.v1.access_service_pb2 import ROLE_VIEWER, RoleBinding
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_coordinator.access.authority import DEFAULT_RULES, Authority, open_authority
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server import own_pki
from leasehold_coordinator.server.http_tls import PkiTls
from leasehold_coordinator.server.own_pki import OwnPki, PkiFiles
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import Holder, issue, write_rows
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.ports import free_port

ANYWHERE = "0.0.0.0:0"
OFTEN = """
from leasehold_coordinator.server import own_pki, web_listener
own_pki.POLL_INTERVAL_S = web_listener.POLL_S = 0.05
"""


class Pki:
    """A PKI of others, and the files of a coordinator."""

    def __init__(self, folder: Path) -> None:
        for name in ("authority", "tls"):
            (folder / name).mkdir(mode=0o700)
        self.authority = open_authority(folder / "authority")
        self.files = PkiFiles(
            *(folder / "tls" / name for name in ("server.pem", "server.key", "clients.pem"))
        )
        self.files.client_ca.write_bytes(self.authority.pem)
        self.replace(self.authority)

    def replace(self, authority: Authority) -> bytes:
        """Gives the server another certificate, and returns it."""
        pair = authority.issue_server(["localhost", "127.0.0.1"])
        self.files.key.touch(0o600)
        self.files.key.write_bytes(pair.key)
        self.files.certificate.write_bytes(pair.chain)
        return pair.chain

    def issue(self, identity: str, life_s: float = 600) -> Holder:
        """A certificate of a user or a worker."""
        return issue(self.authority, identity, life=datetime.timedelta(seconds=life_s))


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


@pytest.fixture
def page_port() -> int:
    return free_port()


@pytest.fixture
def coordinator(tmp_path: Path, pki: Pki, page_port: int) -> Iterator[CoordinatorProcess]:
    """A coordinator off loopback with the PKI, and with the web page."""
    names = ("tls_certificate", "tls_key", "tls_client_ca")
    settings = tmp_path / "coordinator.toml"
    settings.write_text(
        "".join(f"{name} = {str(path)!r}\n" for name, path in zip(names, pki.files, strict=True))
    )
    database = tmp_path / "store.sqlite3"
    write_rows(database, binding_row(RoleBinding(identity="user/alice", role=ROLE_VIEWER)))
    started = CoordinatorProcess(
        tmp_path,
        ANYWHERE,
        ANYWHERE,
        prelude=OFTEN,
        options=["--config", str(settings), "--web", f"0.0.0.0:{page_port}"],
    )
    started.start()
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def near(address: str) -> str:
    """An address on all interfaces, as this host calls it."""
    return f"127.0.0.1:{address.rpartition(':')[2]}"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_its_certificates_need_no_record_and_can_be_revoked(
    coordinator: CoordinatorProcess, pki: Pki
) -> None:
    alice = pki.issue("user/alice")
    with (
        alice.open_channel(near(coordinator.address)) as channel,
        Client(f"unix:{coordinator.folder / 'store.sock'}") as admin,
    ):
        fleet = FleetServiceStub(channel)
        worker = ScriptedWorker(
            pki.issue("worker/alpha").open_channel(near(coordinator.worker_address)),
            ConnectRequest(hello=make_hello("alpha")),
        )
        coordinator.workers.append(worker)
        worker.welcome()
        assert [one.name for one in fleet.ListWorkers(ListWorkersRequest(), timeout=20).workers] == ["alpha"]
        watch = fleet.WatchFleet(WatchFleetRequest(), timeout=60)
        next(watch)
        assert admin.certificates.revoke(alice.issued.serial) == [alice.issued.serial]
        with pytest.raises(grpc.RpcError) as error:
            for _ in watch:
                pass
        assert "is revoked" in (cast("grpc.Call", error.value).details() or "")
        with pytest.raises(LeaseholdError, match="no certificate has the serial number"):
            admin.certificates.revoke("no-serial")
        admin.certificates.block("worker/alpha")
        assert "is blocked" in worker.wait_end().goodbye.error.message
        with pytest.raises(LeaseholdError, match="no listener for enrolment"):
            admin.enrolment.create_join_token("worker/beta")


def test_changed_files_are_read_and_wrong_ones_ignored(
    coordinator: CoordinatorProcess, pki: Pki, tmp_path: Path, page_port: int
) -> None:
    host, _, port = near(coordinator.address).rpartition(":")

    def shown() -> str:
        return ssl.get_server_certificate((host, int(port)))

    def shown_by_page() -> str:
        return ssl.get_server_certificate((host, page_port))

    first = shown()
    pki.files.certificate.write_bytes(open_authority(tmp_path).issue_server(["localhost"]).chain)
    wait_until(lambda: "the changed TLS files are ignored" in coordinator.log())
    assert shown() == first
    certificate, key = self_signed(rsa.generate_private_key(65_537, 1_024))
    pki.files.key.write_bytes(key)
    pki.files.certificate.write_bytes(certificate)
    wait_until(lambda: "can't be used for TLS" in coordinator.log())
    assert shown() == shown_by_page() == first
    pki.files.client_ca.write_bytes("# Főtanúsítvány\n".encode() + pki.authority.pem)
    second = pki.replace(pki.authority)
    wait_until(lambda: shown().encode() == second)
    wait_until(lambda: shown_by_page().encode() == second)
    with pki.issue("user/alice").open_channel(near(coordinator.address)) as channel:
        FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=20)


@pytest.mark.parametrize("name", ["certificate", "key", "client_ca"])
def test_files_that_are_no_pki_are_refused(pki: Pki, name: str) -> None:
    path: Path = getattr(pki.files, name)
    path.write_text("nothing")
    with pytest.raises(StartError, match=f"{path} holds no"):
        OwnPki(pki.files)
    path.unlink()
    told = f"client_ca: {path} of the setting tls_{name} can't be read: No such file or directory$"
    with pytest.raises(StartError, match=told):
        OwnPki(pki.files)


def test_a_pair_that_does_not_fit_is_refused(pki: Pki, tmp_path: Path) -> None:
    pki.files.key.write_bytes(pki.authority.issue_server(["localhost"]).key)
    with pytest.raises(StartError, match="is not the key of the first certificate"):
        OwnPki(pki.files)
    rules = DEFAULT_RULES._replace(server_life=datetime.timedelta(minutes=-1))
    pki.replace(open_authority(tmp_path / "authority", rules))
    with pytest.raises(StartError, match="is not valid now"):
        OwnPki(pki.files)
    pki.replace(pki.authority)
    pki.files.key.chmod(0o644)
    with pytest.raises(StartError, match="every user of this host may read"):
        OwnPki(pki.files)


def test_the_log_warns_of_a_short_lived_certificate_in_the_last_third_of_its_life(
    pki: Pki, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules = DEFAULT_RULES._replace(server_life=datetime.timedelta(days=3))
    pki.replace(open_authority(tmp_path / "authority", rules))
    own = OwnPki(pki.files)
    own.poll()
    assert not caplog.messages
    late = own.content.expire_time - datetime.timedelta(hours=23)
    monkeypatch.setattr(own_pki, "PRESENT", lambda: late)
    own.poll()
    assert caplog.messages == [f"{pki.files.certificate} expires at {own.content.expire_time}: replace it"]


def self_signed(key: rsa.RSAPrivateKey) -> tuple[bytes, bytes]:
    """A certificate of a server without an authority, and its key, as PEM."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=30))
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), pem


def of_unknown_curve(pem: bytes) -> bytes:
    """A private key on P-256 with the curve's identifier replaced by one that no library knows."""
    der = serialization.load_pem_private_key(pem, None).private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    text = base64.encodebytes(
        der.replace(bytes.fromhex("2a8648ce3d030107"), bytes.fromhex("2a8648ce3d030177"))
    )
    return b"-----BEGIN PRIVATE KEY-----\n" + text + b"-----END PRIVATE KEY-----\n"


@pytest.mark.parametrize("kind", ["short", "curve"])
def test_a_key_that_openssl_refuses_leaves_the_previous_files_in_use(
    pki: Pki, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    files = OwnPki(pki.files)
    first = files.content
    if kind == "short":
        certificate, key = self_signed(rsa.generate_private_key(65_537, 1_024))
        pki.files.certificate.write_bytes(certificate)
        pki.files.key.write_bytes(key)
        rule = "can't be used for TLS"
    else:
        pki.files.key.write_bytes(of_unknown_curve(pki.files.key.read_bytes()))
        rule = "holds no private key"
    files.poll()
    assert files.content is first
    assert rule in caplog.text
    with pytest.raises(StartError, match=rule):
        OwnPki(pki.files)
    pki.replace(pki.authority)
    files.poll()
    assert files.content is not first


def test_a_chmod_or_time_makes_refused_files_usable(
    pki: Pki, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = OwnPki(pki.files)
    first = files.content
    pki.replace(pki.authority)
    pki.files.key.chmod(0o604)
    for _ in range(3):
        files.poll()
    assert files.content is first
    assert caplog.text.count("give it the mode 0600") == 1
    pki.files.key.chmod(0o600)
    files.poll()
    second = files.content
    assert second is not first
    early = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
    pki.replace(pki.authority)
    with monkeypatch.context() as patch:
        patch.setattr(own_pki, "PRESENT", lambda: early)
        files.poll()
        assert files.content is second
    assert "is not valid now" in caplog.text
    files.poll()
    assert files.content is not second


def test_text_between_certificates_may_be_of_any_encoding(pki: Pki) -> None:
    pki.files.client_ca.write_bytes("# Főtanúsítvány\n".encode() + pki.authority.pem)
    files = OwnPki(pki.files)
    assert len(PkiTls(files).context.get_ca_certs()) == 1
