"""A rotation of the CA under live sessions and watches."""

import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from leasehold.v1.access_service_pb2 import ROLE_VIEWER, RoleBinding
from leasehold.v1.certificate_service_pb2 import CERTIFICATE_STATE_RETIRED, CERTIFICATE_STATE_VALID
from leasehold.v1.enrolment_service_pb2 import RenewCertificateRequest
from leasehold.v1.enrolment_service_pb2_grpc import RenewalServiceStub
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import Holder, enrol, write_rows
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.server.test_own_pki import ANYWHERE, near, wait_until

PRELUDE = """
from leasehold_coordinator.commands import enrolment
from leasehold_coordinator.fleet import authority_changes
enrolment.RENEW_FROM = 0.0
authority_changes.CHECK_INTERVAL_S = 0.05
"""
IDENTITIES = ("user/alice", "worker/alpha")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator off loopback with a state directory of its own."""
    started = CoordinatorProcess(
        tmp_path, ANYWHERE, ANYWHERE, prelude=PRELUDE, options=["--state-dir", str(tmp_path / "state")]
    )
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def renew(holder: Holder, address: str) -> Holder:
    """Renews a worker's certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    csr = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([])).sign(key, hashes.SHA256())
    request = RenewCertificateRequest(csr=csr.public_bytes(serialization.Encoding.DER))
    with holder.open_channel(address) as channel:
        found = RenewalServiceStub(channel).RenewCertificate(request, timeout=20).certificate
    pem = serialization.Encoding.PEM
    authorities = [x509.load_der_x509_certificate(one).public_bytes(pem) for one in found.ca_certificates]
    return holder._replace(
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
        chain=x509.load_der_x509_certificate(found.certificate).public_bytes(pem),
        roots=b"".join(authorities),
    )


def server_issuer(address: str) -> x509.Name:
    """The issuer of the certificate that a server shows."""
    host, _, port = address.rpartition(":")
    return x509.load_pem_x509_certificate(ssl.get_server_certificate((host, int(port))).encode()).issuer


def test_a_rotation_ends_no_session(coordinator: CoordinatorProcess, tmp_path: Path) -> None:
    state = tmp_path / "state"
    alice, alpha = enrol(tmp_path / "store.sqlite3", state, *IDENTITIES)
    write_rows(tmp_path / "store.sqlite3", binding_row(RoleBinding(identity="user/alice", role=ROLE_VIEWER)))
    coordinator.start()
    clients, workers = near(coordinator.address), near(coordinator.worker_address)

    def connect(holder: Holder) -> ScriptedWorker:
        hello = ConnectRequest(hello=make_hello("alpha"))
        coordinator.workers.append(ScriptedWorker(holder.open_channel(workers), hello))
        coordinator.workers[-1].welcome()
        return coordinator.workers[-1]

    with Client(f"unix:{coordinator.folder / 'store.sock'}") as admin, alice.open_channel(clients) as channel:
        fleet = FleetServiceStub(channel)
        worker = connect(alpha)
        watch = fleet.WatchFleet(WatchFleetRequest(), timeout=100)
        next(watch)
        (first,) = admin.certificates.authorities()
        with pytest.raises(LeaseholdError, match="is the only authority"):
            admin.certificates.retire(first.serial)
        second = admin.certificates.rotate()
        with pytest.raises(LeaseholdError, match="there are two authorities already"):
            admin.certificates.rotate()
        old, new = admin.certificates.authorities()
        assert (old.signs_server, old.signs_clients, old.valid_certificate_count) == (True, False, 2)
        assert (new.signs_server, new.signs_clients) == (False, True)
        assert sorted(new.waiting) == ["user/alice", "worker/alpha"]
        names = [one.subject for one in x509.load_pem_x509_certificates((state / "ca.pem").read_bytes())]
        assert server_issuer(workers) == names[0], "the worker trusts only the first so far"
        with alpha.open_channel(workers) as probe:
            grpc.channel_ready_future(probe).result(20)
        with pytest.raises(LeaseholdError, match="2 valid certificates of the authority are left"):
            admin.certificates.retire(first.serial)

        told = worker.wait(lambda frame: frame.HasField("authorities")).authorities.certificates
        assert [x509.load_der_x509_certificate(one).subject for one in told] == names

        renewed = renew(alpha, workers)
        worker.report()
        assert not worker.ended
        assert len(x509.load_pem_x509_certificates(renewed.roots)) == 2
        with renewed.open_channel(workers) as probe:
            grpc.channel_ready_future(probe).result(20)
        assert server_issuer(workers) == names[0], "it has not used the new certificate yet"
        worker = connect(renewed)
        assert list(admin.certificates.authorities()[1].waiting) == ["user/alice"]
        renewed_alice = renew(alice, clients)
        assert server_issuer(clients) == names[0], "alice trusts only the first so far"
        with renewed_alice.open_channel(clients) as other:
            FleetServiceStub(other).ListWorkers(ListWorkersRequest(), timeout=20)
        wait_until(lambda: server_issuer(workers) == server_issuer(clients) == names[1])
        fleet.ListWorkers(ListWorkersRequest(), timeout=20)

        admin.certificates.retire(first.serial, force=True)
        assert [one.serial for one in admin.certificates.authorities()] == [second.serial]
        states = {(one.authority, one.state) for one in admin.certificates.all(include_ended=True)}
        assert states == {
            (first.serial, CERTIFICATE_STATE_RETIRED),
            (second.serial, CERTIFICATE_STATE_VALID),
        }
        fleet.ListWorkers(ListWorkersRequest(), timeout=20)
        worker.report()
        with renewed.open_channel(workers) as probe:
            grpc.channel_ready_future(probe).result(20)
        assert not worker.ended
        assert watch.is_active()
    assert (state / "ca.pem").read_bytes() == renewed.roots[renewed.roots.rindex(b"-----BEGIN") :]
