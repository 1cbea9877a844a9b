"""Connections are bounded, must be set up in time, and end when they are idle."""

import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from leasehold_client.coordinator.client import Client
from leasehold_coordinator.server.channel_options import DESCRIPTORS, scaled

from tests.coordinator.conftest import CoordinatorProcess

FEW = """
from leasehold_coordinator.server import listeners
listeners.CLIENT_CONNECTIONS = listeners.WORKER_CONNECTIONS = 3
"""
QUICK = """
from leasehold_coordinator.server import channel_options as c
SHORT = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")
c.OPTIONS = [(key, 500 if key in SHORT else value) for key, value in c.OPTIONS]
"""

TWO_CALLS = """
import sys, threading
from leasehold_client.coordinator.client import Client
import grpc  # later than our package, which sets gRPC's log level
with Client(sys.argv[1]) as client:
    idle = threading.Event()
    client.workers()
    client._connection.channel.subscribe(lambda state: state is grpc.ChannelConnectivity.IDLE and idle.set())
    assert idle.wait(20)
    print(client.workers())
"""


def connected(address: str) -> socket.socket:
    """A connection that sends nothing."""
    host, _, port = address.rpartition(":")
    found = socket.create_connection((host, int(port)))
    found.settimeout(20)
    return found


@pytest.fixture
def coordinator(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[CoordinatorProcess]:
    """A coordinator with bounds of a test."""
    started = CoordinatorProcess(tmp_path, prelude=request.param)
    started.start()
    yield started
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


@pytest.mark.parametrize("coordinator", [FEW], indirect=True)
def test_connections_are_bounded(coordinator: CoordinatorProcess) -> None:
    for address in (coordinator.address, coordinator.worker_address):
        with ExitStack() as stack:
            held = [stack.enter_context(connected(address)) for _ in range(4)]
            assert held[3].recv(1) == b""
            assert not select.select(held[:3], [], [], 0)[0]
    with Client(coordinator.address) as client:  # repeats its calls until the connections have ended
        assert client.workers() == []


@pytest.mark.parametrize("coordinator", [QUICK], indirect=True)
def test_a_connection_without_a_handshake_ends(coordinator: CoordinatorProcess) -> None:
    for address in (coordinator.address, coordinator.worker_address):
        with connected(address) as connection:
            assert connection.recv(1) == b""


@pytest.mark.long
@pytest.mark.parametrize("coordinator", [QUICK], indirect=True)
def test_clients_reconnect_silently_after_an_idle_time(coordinator: CoordinatorProcess) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TWO_CALLS, coordinator.address],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("limit", "bound"), [(-1, 2_048), (65_536, 2_048), (DESCRIPTORS // 2, 1_024), (1_024, 61), (1, 16)]
)
def test_bounds_follow_the_limit_of_open_files(
    monkeypatch: pytest.MonkeyPatch, limit: int, bound: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert scaled(2_048) == bound
