"""Off loopback, each listener requires a client certificate whose kind fits."""

import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread
from typing import cast

import grpc
import pytest
from grpc_status import rpc_status
from leasehold.v1 import access_service_pb2, errors_pb2
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.audit_pb2 import AUDIT_OUTCOME_ALLOWED
from leasehold.v1.audit_service_pb2 import ListAuditEntriesRequest
from leasehold.v1.audit_service_pb2_grpc import AuditServiceStub
from leasehold.v1.certificate_service_pb2 import CERTIFICATE_STATE_REVOKED
from leasehold.v1.enrolment_service_pb2 import RenewCertificateRequest
from leasehold.v1.enrolment_service_pb2_grpc import RenewalServiceStub
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.worker.v1 import session_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator import certificates
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_coordinator.access.authority import open_authority
from leasehold_coordinator.access.certificates import Revocation
from leasehold_coordinator.fleet.hello_bounds import HELLO_BURST
from leasehold_coordinator.storage.rows import binding_row, revocation_row

from tests.certificates import Holder, enrol, issue, record, write_rows
from tests.channels import open_channel, token
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

ANYWHERE = "0.0.0.0:0"
IDENTITIES = (
    *("user/alice", "user/carol", "user/dave", "user/mallory", "service/batch"),
    *("worker/alpha", "worker/beta", "worker/gamma", "worker/delta"),
)

FUTURE = """
import time
from pathlib import Path
from leasehold_coordinator.storage.store import Store
DAYS_NS = 40 * 86_400 * 10**9
Store.highest_time_ns = property(lambda self: time.time_ns() + DAYS_NS * Path({flag!r}).exists())
"""
"""A clock that is 40 days ahead as soon as a file exists."""

FEW_HELLOS = """
from leasehold_coordinator.api import session_service
from leasehold_coordinator.fleet import hello_bounds
session_service.HELLO_LIMIT = 4
hello_bounds.HELLOS_PER_S = 1e-6
"""


class Remote:
    """A coordinator that serves other hosts, and the holders of certificates."""

    def __init__(self, folder: Path) -> None:
        self.later = folder / "later"
        prelude = FUTURE.format(flag=str(self.later)) + FEW_HELLOS
        self.coordinator = CoordinatorProcess(folder, ANYWHERE, ANYWHERE, prelude=prelude)
        database = folder / "store.sqlite3"
        holders = enrol(database, credentials_directory(), *IDENTITIES)
        self.holders = dict(zip(IDENTITIES, holders, strict=True))
        bindings = [
            RoleBinding(identity=name, role=access_service_pb2.ROLE_VIEWER)
            for name in ("user/alice", "user/carol", "user/dave", "service/batch")
        ]
        write_rows(
            database, revocation_row(Revocation("user/mallory", "local/root", 1)), *map(binding_row, bindings)
        )
        self.renewed = issue(
            open_authority(credentials_directory()), "user/carol", self.holders["user/carol"].issued.serial
        )
        self.other = issue(open_authority(credentials_directory()), "user/carol")
        for holder in (self.renewed, self.other):
            record(database, holder)
        self.coordinator.start()
        self.admin = Client(f"unix:{folder / 'store.sock'}")
        self.clients, self.workers = (
            f"127.0.0.1:{address.rpartition(':')[2]}"
            for address in (self.coordinator.address, self.coordinator.worker_address)
        )

    def fleet(self, holder: Holder | str) -> FleetServiceStub:
        """The API as the holder of a certificate calls it."""
        found = self.holders[holder] if isinstance(holder, str) else holder
        return FleetServiceStub(found.open_channel(self.clients))

    def connect(self, holder: str, name: str) -> ScriptedWorker:
        """Connects a worker with a certificate, and a hello with a name."""
        channel = self.holders[holder].open_channel(self.workers)
        worker = ScriptedWorker(channel, ConnectRequest(hello=make_hello(name)))
        self.coordinator.workers.append(worker)
        return worker


def refusals(remote: Remote, identity: str) -> set[tuple[str, str]]:
    """The methods and the reasons in the audit of refusals of an identity."""
    asked = ListAuditEntriesRequest(filter=f'identity = "{identity}" AND outcome = REFUSED', page_size=1000)
    with grpc.insecure_channel(f"unix:{remote.coordinator.folder / 'store.sock'}") as channel:
        found = AuditServiceStub(channel).ListAuditEntries(asked).entries
    return {(entry.method.rpartition("/")[2], errors_pb2.ErrorReason.Name(entry.reason)) for entry in found}


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Remote]:
    """A coordinator on all addresses of the host."""
    started = Remote(tmp_path_factory.mktemp("remote"))
    yield started
    for worker in started.coordinator.workers:
        worker.close()
    started.admin.close()
    assert started.coordinator.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.coordinator.log()


def refusal(stub: FleetServiceStub, **metadata: str) -> str:
    """The message with which a call is refused as unauthenticated."""
    with pytest.raises(grpc.RpcError) as error:
        stub.ListWorkers(ListWorkersRequest(), timeout=20, metadata=tuple(metadata.items()))
    call = cast("grpc.Call", error.value)
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED, call.details()
    assert rpc_status.from_call(call) is not None
    return call.details() or ""


def test_the_start_says_how_others_get_certificates(remote: Remote) -> None:
    output = remote.coordinator.process.stdout
    assert output is not None
    lines = [output.readline() for _ in range(3)]
    create = re.compile(
        "`leasehold token create --coordinator unix:[^ ]*/store[.]sock --(worker|user) NAME` here"
    )
    for line, who, then in (
        (lines[1], "worker", "`leasehold worker --join -`"),
        (lines[2], "user", "`leasehold login --token -`"),
    ):
        found = create.search(line)
        assert found is not None, line
        assert found[1] == who
        assert f", then {then}" in line


@pytest.mark.parametrize("identity", ["user/alice", "service/batch"])
def test_a_certificate_of_a_user_or_a_service_is_an_identity(remote: Remote, identity: str) -> None:
    remote.fleet(identity).ListWorkers(ListWorkersRequest(), timeout=20)


def test_a_token_does_not_replace_a_certificate(remote: Remote) -> None:
    for address in (remote.clients, remote.workers):
        with open_channel(address) as channel, pytest.raises(grpc.RpcError) as error:
            FleetServiceStub(channel).ListWorkers(ListWorkersRequest(), timeout=20)
        assert cast("grpc.Call", error.value).code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_of_another_authority_is_not_one(remote: Remote, tmp_path: Path) -> None:
    stranger = issue(open_authority(tmp_path), "user/alice")._replace(
        roots=remote.holders["user/alice"].roots
    )
    with pytest.raises(grpc.RpcError) as error:
        remote.fleet(stranger).ListWorkers(ListWorkersRequest(), timeout=20)
    assert cast("grpc.Call", error.value).code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_with_two_credentials_is_refused(remote: Remote) -> None:
    bearer = f"Bearer {token('client.token')}"
    assert "only one credential" in refusal(remote.fleet("user/alice"), authorization=bearer)


def test_the_kind_must_fit_the_listener(remote: Remote) -> None:
    assert refusal(remote.fleet("worker/alpha")) == (
        "the certificate is of worker/alpha, and this address is for user/NAME or service/NAME"
    )
    worker = remote.connect("user/alice", "alice")
    worker.wait_ended()
    assert worker.call.code() is grpc.StatusCode.UNAUTHENTICATED
    assert "this address is for worker/NAME" in (worker.call.details() or "")


def test_a_certificate_that_the_store_does_not_know_is_refused(remote: Remote) -> None:
    """Whoever has stolen the key of the CA can sign certificates, and record none."""
    unknown = issue(open_authority(credentials_directory()), "user/alice")
    assert "store does not know certificate" in refusal(remote.fleet(unknown))


def test_a_blocked_identity_is_refused(remote: Remote) -> None:
    assert refusal(remote.fleet("user/mallory")).startswith("user/mallory is blocked")


def test_a_worker_has_the_name_of_its_certificate(remote: Remote) -> None:
    impostor = remote.connect("worker/beta", "alpha").wait_end().goodbye
    assert impostor.reason == session_pb2.GOODBYE_REASON_REFUSED
    assert impostor.error.reason == errors_pb2.ERROR_REASON_IDENTITY_MISMATCH
    worker = remote.connect("worker/beta", "beta")
    worker.welcome()
    worker.up.put(ConnectRequest(hello=make_hello("alpha", worker_id="worker-beta")))
    assert worker.wait_end().goodbye.error.reason == errors_pb2.ERROR_REASON_IDENTITY_MISMATCH


def test_streams_without_hello_count_for_their_worker_only(remote: Remote) -> None:
    """Workers of several hosts may share an address, and one may have many addresses."""
    stub = SessionServiceStub(remote.holders["worker/alpha"].open_channel(remote.workers))
    over = Event()

    def silence() -> Iterator[ConnectRequest]:
        over.wait(60)
        yield from ()

    streams = [stub.Connect(silence(), timeout=60) for _ in range(3)]
    refused: SimpleQueue[grpc.StatusCode] = SimpleQueue()

    def watch(stream: Iterator[object]) -> None:
        with suppress(grpc.RpcError):
            next(stream)
        refused.put(cast("grpc.Call", stream).code())

    threads = [Thread(target=watch, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    assert refused.get(timeout=30) is grpc.StatusCode.RESOURCE_EXHAUSTED  # alpha has half of the places
    remote.connect("worker/beta", "beta").welcome()
    over.set()
    for stream, thread in zip(streams, threads, strict=True):
        stream.cancel()
        thread.join()


def test_refused_and_bound_workers_are_in_the_audit(remote: Remote) -> None:
    remote.connect("worker/gamma", "gamma").welcome()
    (bound,) = remote.admin.audit_entries(filter='identity = "worker/gamma"')
    assert (bound.outcome, bound.resource) == (AUDIT_OUTCOME_ALLOWED, "worker/gamma")
    assert "GPU-gamma-0" in bound.arguments
    remote.connect("worker/gamma", "alpha").wait_end()
    # The entry is written after the stream has ended.
    until(lambda: len(list(remote.admin.audit_entries(filter='identity = "worker/gamma"'))) == 2)
    refused, _ = remote.admin.audit_entries(filter='identity = "worker/gamma"')
    assert refused.reason == errors_pb2.ERROR_REASON_IDENTITY_MISMATCH


def test_sessions_and_watches_end_with_their_certificate(remote: Remote) -> None:
    worker = remote.connect("worker/alpha", "alpha")
    worker.welcome()
    watch = remote.fleet("user/alice").WatchFleet(WatchFleetRequest(), timeout=60)
    next(watch)
    remote.later.touch()
    try:
        assert "of user/alice expired at" in ending(watch)
        ended = worker.wait_end().goodbye
        assert (ended.reason, ended.error.reason) == (
            session_pb2.GOODBYE_REASON_REFUSED,
            errors_pb2.ERROR_REASON_UNAUTHENTICATED,
        )
    finally:
        remote.later.unlink()


def ending(watch: Iterator[object]) -> str:
    """The message with which a watch ends as unauthenticated."""
    with pytest.raises(grpc.RpcError) as error:
        for _ in watch:
            pass
    call = cast("grpc.Call", error.value)
    assert call.code() is grpc.StatusCode.UNAUTHENTICATED, call.details()
    return call.details() or ""


def test_a_revocation_is_effective_on_all_that_was_renewed(remote: Remote) -> None:
    first = remote.holders["user/carol"].issued.serial
    second = remote.renewed.issued.serial
    watch = remote.fleet(remote.renewed).WatchFleet(WatchFleetRequest(), timeout=60)
    next(watch)
    other = remote.fleet(remote.other).WatchFleet(WatchFleetRequest(), timeout=60)
    next(other)
    calls = {one.serial: one.call_count for one in remote.admin.certificates.all()}
    assert (calls[first], calls[second], calls[remote.other.issued.serial]) == (0, 1, 1)
    assert remote.admin.certificates.revoke(first) == [first, second]
    assert f"certificate {second} of user/carol is revoked" in ending(watch)
    assert other.is_active(), "a certificate of another login is another family"
    other.cancel()
    for holder in (remote.holders["user/carol"], remote.renewed):
        assert "is revoked" in refusal(remote.fleet(holder))
    states = {one.serial: one.state for one in remote.admin.certificates.all(include_ended=True)}
    assert states[first] == states[second] == CERTIFICATE_STATE_REVOKED
    assert first not in {one.serial for one in remote.admin.certificates.all()}
    with pytest.raises(LeaseholdError, match=r"serial number 'alice': .* as in user/alice"):
        remote.admin.certificates.revoke("alice")


@pytest.mark.long
def test_a_block_is_effective_until_it_ends(remote: Remote) -> None:
    worker = remote.connect("worker/gamma", "gamma")
    worker.welcome()
    watch = remote.fleet("user/dave").WatchFleet(WatchFleetRequest(), timeout=60)
    next(watch)
    for identity in ("worker/gamma", "user/dave"):
        assert remote.admin.certificates.block(identity).blocked_by.startswith("local/")
    assert "user/dave is blocked" in ending(watch)
    assert "user/dave is blocked" in refusal(remote.fleet("user/dave"))
    ended = worker.wait_end().goodbye
    assert (ended.reason, ended.error.message) == (
        session_pb2.GOODBYE_REASON_REFUSED,
        "worker/gamma is blocked: an admin may `leasehold ca unblock worker/gamma`",
    )
    refused = {one.name: one.refusal for one in remote.admin.workers()}
    assert refused["gamma"] == ended.error.message
    refusal_of_use = f"worker gamma is [A-Z]+: it is refused, since {ended.error.message}"
    with pytest.raises(LeaseholdError, match=refusal_of_use):
        remote.admin.cordon("gamma", reason="a fan", cordoned_by="ann")
    blocked = [one.identity for one in remote.admin.certificates.blocks()]
    assert blocked == ["user/dave", "user/mallory", "worker/gamma"]
    for identity in ("worker/gamma", "user/dave"):
        remote.admin.certificates.unblock(identity)
    assert {one.refusal for one in remote.admin.workers() if one.name == "gamma"} == {""}
    remote.fleet("user/dave").ListWorkers(ListWorkersRequest(), timeout=20)
    remote.connect("worker/gamma", "gamma").welcome()
    assert {one.refusal for one in remote.admin.workers() if one.name == "gamma"} == {""}
    with pytest.raises(LeaseholdError, match="user/dave is not blocked"):
        remote.admin.certificates.unblock("user/dave")


def test_the_coordinators_own_user_is_not_blocked(remote: Remote) -> None:
    with pytest.raises(LeaseholdError, match="local/root can't be blocked"):
        remote.admin.certificates.block("local/root")


def test_certificates_are_listed_page_by_page(remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = remote.admin.certificates.all(include_ended=True)
    assert [one.identity for one in whole] == sorted([*IDENTITIES, "user/carol", "user/carol"])
    monkeypatch.setattr(certificates, "PAGE_SIZE", 2)
    assert remote.admin.certificates.all(include_ended=True) == whole


def test_refused_hellos_of_a_certificate_are_bounded_too(remote: Remote) -> None:
    last = None
    for _ in range(HELLO_BURST + 1):
        last = remote.connect("worker/gamma", "alpha")
        last.wait_ended()
    assert last is not None
    assert last.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not last.frames
    remote.connect("worker/beta", "beta").welcome()


def test_each_refusal_of_an_enrolled_worker_is_in_the_audit(remote: Remote) -> None:
    """Also those that are no lack of a right."""
    holder = remote.holders["worker/delta"]
    hello = make_hello("delta")
    hello.protocol_version.major += 1
    channel = holder.open_channel(remote.workers)
    worker = ScriptedWorker(channel, ConnectRequest(hello=hello))
    remote.coordinator.workers.append(worker)
    worker.wait_ended()
    with pytest.raises(grpc.RpcError, match="signing request is not valid"):
        RenewalServiceStub(channel).RenewCertificate(RenewCertificateRequest(csr=b"junk"), timeout=20)
    expected = {
        ("Connect", "ERROR_REASON_PROTOCOL_VERSION"),
        ("RenewCertificate", "ERROR_REASON_INVALID_ARGUMENT"),
    }
    until(lambda: expected <= refusals(remote, "worker/delta"))
