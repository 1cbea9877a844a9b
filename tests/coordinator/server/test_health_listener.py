"""The port for health checks: without TLS and identity, and with nothing else."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.server.config import load_config
from leasehold_coordinator.server.health_listener import CALLS, CONNECTIONS, MESSAGE_LIMIT_BYTES
from leasehold_coordinator.server.health_reports import LIVENESS

from tests.coordinator.conftest import CoordinatorProcess, run_coordinator
from tests.coordinator.server.test_health_reports import QUICK
from tests.health_checks import NOT_SERVING, SERVING, Prober, half_open_calls
from tests.ports import free_port


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[tuple[Prober, CoordinatorProcess]]:
    address = f"127.0.0.1:{free_port()}"
    coordinator = CoordinatorProcess(tmp_path, prelude=QUICK, options=["--health-listen", address])
    coordinator.start()
    client = Prober(address)
    yield client, coordinator
    client.channel.close()
    assert coordinator.end(signal.SIGTERM) == 0


def test_checks_need_neither_tls_nor_an_identity(probe: tuple[Prober, CoordinatorProcess]) -> None:
    client, _ = probe
    assert (client.check(), client.check(LIVENESS)) == (SERVING, SERVING)
    with pytest.raises(grpc.RpcError) as refused:
        client.check("leasehold.nothing")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    assert refused.value.details() == "unknown service: give '', or a name of docs/security.md"


def test_a_process_that_answers_is_alive_while_its_store_refuses(
    probe: tuple[Prober, CoordinatorProcess],
) -> None:
    client, coordinator = probe
    store, away = coordinator.folder / "store.sqlite3", coordinator.folder / "away"
    store.rename(away)
    while client.check() == SERVING:
        pass
    assert client.check(LIVENESS) == SERVING
    away.rename(store)
    while client.check() == NOT_SERVING:
        pass


def test_the_port_has_nothing_but_checks(probe: tuple[Prober, CoordinatorProcess]) -> None:
    client, _ = probe
    for method in (
        "/leasehold.v1.FleetService/ListWorkers",
        "/grpc.health.v1.Health/Watch",
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ):
        assert client.code(method) == grpc.StatusCode.UNIMPLEMENTED


def test_requests_are_bounded(probe: tuple[Prober, CoordinatorProcess]) -> None:
    client, _ = probe
    with pytest.raises(grpc.RpcError) as refused:
        client.check("x" * (MESSAGE_LIMIT_BYTES + 1))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.RpcError) as unknown:
        client.check("leasehold.unknown")
    assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


def test_connections_are_bounded(probe: tuple[Prober, CoordinatorProcess]) -> None:
    client, _ = probe
    with contextlib.ExitStack() as held:
        for _ in range(CONNECTIONS):
            held.enter_context(socket.create_connection(client.place, timeout=20))
        further = held.enter_context(socket.create_connection(client.place, timeout=20))
        assert further.recv(1) == b""


def test_half_open_calls_of_one_connection_keep_out_no_other(
    probe: tuple[Prober, CoordinatorProcess],
) -> None:
    client, _ = probe
    with half_open_calls(client, CONNECTIONS * CALLS + 1):
        assert client.check() == SERVING


def test_no_port_unless_the_settings_name_one() -> None:
    assert load_config(None).health_listen == ""
    with pytest.raises(StartError, match="'7404' is not HOST:PORT"):
        load_config(None, health_listen="7404")


def test_a_port_in_use_is_one_line(probe: tuple[Prober, CoordinatorProcess], tmp_path: Path) -> None:
    _, coordinator = probe
    arguments = ["--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0", "--database"]
    taken = ["--health-listen", coordinator.address]
    done = run_coordinator(*arguments, str(tmp_path / "other.sqlite3"), *taken)
    assert done.returncode == 2
    assert "the port is in use; choose another with --health-listen" in done.stderr
