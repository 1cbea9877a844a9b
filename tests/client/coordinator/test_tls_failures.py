"""Each failure of TLS is told with its cause and its remedy, by client and worker alike."""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from leasehold_client.coordinator import tls_failures as clients
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError
from leasehold_coordinator.access import authority as authorities
from leasehold_coordinator.access.authority import LOOPBACK_NAMES, IssueRules
from leasehold_coordinator.server.transport import ServerTls, open_state
from leasehold_worker.session import tls_failures as workers

from tests.ports import free_port

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
