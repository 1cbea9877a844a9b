"""Where a client finds its coordinator, and the credentials for it."""

import socket
from pathlib import Path

import pytest
from leasehold_client.config import DEFAULT_COORDINATOR, default_coordinator
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError

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
        for name in ("ca.pem", "client.token"):
            (credentials / name).write_text("x")

    with Client(ADDRESS, start):
        pass


def test_credentials_that_are_no_files_are_refused(credentials: Path) -> None:
    (credentials / "ca.pem").mkdir()
    with pytest.raises(UsageError, match=r"ca\.pem"):
        Client(ADDRESS)
