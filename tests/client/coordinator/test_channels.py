"""Where a client finds its coordinator, and the credentials for it."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from leasehold_client.config import DEFAULT_COORDINATOR, default_coordinator
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.channels import certificate_file
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError
from leasehold_coordinator.server.transport import open_state

ADDRESS = "127.0.0.1:1"


@pytest.fixture
def credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for credentials."""
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", str(tmp_path))
    return tmp_path


def test_the_socket_comes_first_if_a_coordinator_answers_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    path = tmp_path / "leasehold/coordinator.sock"
    path.parent.mkdir()
    assert default_coordinator() == DEFAULT_COORDINATOR
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert default_coordinator() == DEFAULT_COORDINATOR, "nobody listens yet"
        listener.listen()
        assert default_coordinator() == f"unix:{path}"
    assert default_coordinator() == DEFAULT_COORDINATOR, "the coordinator was killed"


def test_missing_credentials_are_waited_for_and_named(
    credentials: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "REPEAT_LIMIT_S", 0.5)
    waits: list[LeaseholdError] = []
    with pytest.raises(NoCoordinatorError, match=r"ca\.pem is missing: start a coordinator as this user"):
        Client(ADDRESS, waits.append)
    assert waits


def test_credentials_that_come_late_are_found(credentials: Path) -> None:
    def start(_: LeaseholdError) -> None:
        open_state(credentials)

    with Client(ADDRESS, start):
        pass


@pytest.mark.parametrize(("name", "content"), [("ca.pem", ""), ("ca.pem", "x"), ("client.token", "ü" * 40)])
def test_credentials_that_hold_nothing_are_refused(credentials: Path, name: str, content: str) -> None:
    open_state(credentials)
    (credentials / name).write_text(content)
    with pytest.raises(UsageError, match=rf"{name} holds no "):
        Client(ADDRESS)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_socket_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.sock"
    serve = (
        "import os, socket, sys\n"
        "listener = socket.socket(socket.AF_UNIX); listener.bind(sys.argv[1])\n"
        "os.setuid(65534); listener.listen(); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", serve, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        with pytest.raises(UsageError, match="served by the Unix user 65534"):
            Client(f"unix:{path}")


def test_a_path_of_a_socket_that_nobody_serves_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "REPEAT_LIMIT_S", 0.3)
    with pytest.raises(NoCoordinatorError, match="no coordinator answers at unix:"):
        Client(f"unix:{tmp_path}/none.sock")


def test_a_directory_of_credentials_that_can_not_be_looked_at_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", "/" + "x" * 300)
    with pytest.raises(UsageError, match=r"client\.pem can't be read: File name too long; name a directory"):
        certificate_file()


def test_credentials_that_are_no_files_are_refused(credentials: Path) -> None:
    (credentials / "ca.pem").mkdir()
    with pytest.raises(UsageError, match=r"ca\.pem"):
        Client(ADDRESS)
