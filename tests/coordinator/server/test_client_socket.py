"""The path of the socket for clients: stale sockets are replaced, and nothing else is."""

import re
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from leasehold.v1.access_service_pb2 import WhoAmIRequest
from leasehold.v1.access_service_pb2_grpc import AccessServiceStub
from leasehold_client.coordinator.client import Client

from tests.coordinator.conftest import CoordinatorProcess, run_coordinator
from tests.coordinator.unix_users import ANN, BEN, channel_as, connect_as, needs_root

PORTS = ("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0")


def refused(folder: Path, path: Path) -> str:
    """What a coordinator says that can't use a socket's path."""
    done = run_coordinator(*PORTS, "--database", str(folder / "store.sqlite3"), "--socket", str(path))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    return done.stderr


def test_the_socket_of_a_killed_coordinator_is_replaced(coordinator: CoordinatorProcess) -> None:
    path = coordinator.folder / "store.sock"
    coordinator.end(signal.SIGKILL)
    assert path.is_socket()
    coordinator.start()
    with Client(f"unix:{path}") as client:
        assert client.workers() == []
    coordinator.end(signal.SIGTERM)
    assert not path.exists()


def test_a_file_on_the_path_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    assert "another file is there" in refused(tmp_path, path)
    assert path.read_text() == "precious"


def test_a_socket_in_use_stays(tmp_path: Path) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        assert "another process listens there" in refused(tmp_path, path)
    assert path.exists()


@pytest.mark.parametrize("name", ["x" * 120, "missing/folder/socket"])
def test_a_path_that_cannot_be_used_is_one_line(tmp_path: Path, name: str) -> None:
    assert "choose" in refused(tmp_path, tmp_path / name)


def test_many_connections_share_the_socket(coordinator: CoordinatorProcess) -> None:
    clients = [Client(f"unix:{coordinator.folder}/store.sock") for _ in range(20)]
    for client in clients:
        assert client.workers() == []
    for client in clients:
        client.close()


@pytest.mark.long
def test_the_socket_of_a_later_coordinator_stays(coordinator: CoordinatorProcess) -> None:
    path = coordinator.folder / "store.sock"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as later:
        later.bind(str(path))
        coordinator.end(signal.SIGTERM)
        assert path.exists()


def test_connections_beyond_the_limit_are_closed(coordinator: CoordinatorProcess) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "from leasehold_coordinator.server import client_socket as s\n"
        "s.CONNECTIONS_LIMIT, s.OWN_RESERVE = 2, 0"
    )
    coordinator.start()
    path = str(coordinator.folder / "store.sock")
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(3)]
        for one in held:
            one.connect(path)
            one.settimeout(20)
        assert held[2].recv(1) == b""
    assert re.search(
        r"has 1 connections of the Unix user \d+ and 1 in all, which is the limit", coordinator.log()
    )
    with Client(f"unix:{path}") as client:
        assert client.workers() == []


@needs_root
def test_others_leave_connections_for_the_coordinators_own_user(coordinator: CoordinatorProcess) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "from leasehold_coordinator.server import client_socket as s; s.CONNECTIONS_LIMIT = 2"
    )
    coordinator.start()
    path = coordinator.folder / "store.sock"
    with channel_as(path, ANN) as ann, channel_as(path, BEN) as ben, channel_as(path, BEN + 1) as third:
        for channel in (ann, ben):
            assert AccessServiceStub(channel).WhoAmI(WhoAmIRequest()).identity
        with pytest.raises(grpc.RpcError):
            AccessServiceStub(third).WhoAmI(WhoAmIRequest())
        with Client(f"unix:{path}") as client:
            assert client.workers() == []


def test_a_path_with_odd_characters(coordinator: CoordinatorProcess) -> None:
    path = coordinator.folder / "a %20#?.sock"
    coordinator.end(signal.SIGTERM)
    coordinator.options = ["--socket", str(path)]
    coordinator.start()
    with Client(f"unix:{path}") as client:
        assert client.workers() == []


def test_a_stop_on_a_disk_that_cannot_be_written_is_a_stop(coordinator: CoordinatorProcess) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "import pathlib, errno\n"
        "unlink = pathlib.Path.unlink\n"
        "def fail(path, missing_ok=False):\n"
        "    if path.suffix in ('.sock', '.grpc'): raise OSError(errno.EROFS, 'Read-only file system')\n"
        "    unlink(path, missing_ok)\n"
        "pathlib.Path.unlink = fail"
    )
    coordinator.folder.joinpath("store.sock").unlink(missing_ok=True)
    coordinator.start()
    assert coordinator.end(signal.SIGTERM) == 0
    coordinator.prelude = ""
    coordinator.start()


@needs_root
def test_one_user_leaves_room_for_others(coordinator: CoordinatorProcess) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "from leasehold_coordinator.server import client_socket as s; s.CONNECTIONS_LIMIT = 4"
    )
    coordinator.start()
    path = coordinator.folder / "store.sock"
    with ExitStack() as stack:
        held = [stack.enter_context(connect_as(path, ANN)) for _ in range(6)]
        for one in held[2:]:
            one.settimeout(20)
            assert one.recv(1) == b""
        with Client(f"unix:{path}") as client:
            assert client.workers() == []
