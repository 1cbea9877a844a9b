"""The coordinator's port for metrics: a real coordinator is scraped while workers come and commands end."""

import asyncio
import signal
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from leasehold.v1 import lease_pb2
from leasehold.v1.access_service_pb2 import ROLE_VIEWER, RoleBinding
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest
from leasehold.worker.v1.session_pb2 import ConnectRequest, Hello, WorkerLoad
from leasehold_client.config import credentials_directory
from leasehold_coordinator.access.certificates import Revocation
from leasehold_coordinator.access.roles import Role
from leasehold_coordinator.access.secret_vault import open_vault
from leasehold_coordinator.core.known_worker import KnownWorker, SessionId
from leasehold_coordinator.errors import StartError
from leasehold_coordinator.fleet.fleet import Fleet
from leasehold_coordinator.server import metrics_listener
from leasehold_coordinator.server.config import load_config
from leasehold_coordinator.server.fleet_gauges import FleetGauges
from leasehold_coordinator.server.metrics_access import MetricsAccess
from leasehold_coordinator.server.metrics_listener import CONNECTIONS, MetricsListener, open_listener
from leasehold_coordinator.server.metrics_request import HEAD_LIMIT_BYTES
from leasehold_coordinator.storage.rows import binding_row, revocation_row
from leasehold_coordinator.storage.store import Store
from prometheus_client import Metric

from tests.certificates import Holder, enrol, write_rows
from tests.coordinator.conftest import CoordinatorProcess, run_coordinator
from tests.coordinator.scripted_worker import make_hello
from tests.ports import free_port
from tests.scrapes import TIMEOUT_S, promtool, request, scrape, scrape_text, wait_for


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def coordinator(tmp_path: Path, address: str) -> Iterator[CoordinatorProcess]:
    started = CoordinatorProcess(tmp_path, options=["--metrics-listen", address])
    started.start()
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def test_a_scrape_tells_of_workers_and_commands(coordinator: CoordinatorProcess, address: str) -> None:
    first = scrape(address)
    assert first.value("leasehold_fleet_workers") == 0
    assert first.value("leasehold_fleet_gpus") is None
    assert first.value("leasehold_coordinator_store_writable") == 1
    authority = x509.load_pem_x509_certificate((credentials_directory() / "ca.pem").read_bytes())
    for bound, time_of_bound in (
        ("not_before", authority.not_valid_before_utc),
        ("expiry", authority.not_valid_after_utc),
    ):
        name = f"leasehold_coordinator_certificate_{bound}_timestamp_seconds"
        assert first.value(name, certificate="authority") == time_of_bound.timestamp()

    worker = coordinator.connect()
    worker.welcome()
    load = WorkerLoad(sequence=1, gpu_leases=worker.first.hello.gpu_leases, pending_claimers=3)
    load.gpu_leases[0].state = lease_pb2.SLOT_STATE_LEASED
    worker.up.put(ConnectRequest(worker_load=load))
    seen = wait_for(address, lambda now: now.value("leasehold_fleet_claims_waiting", worker="alpha") == 3)
    assert seen.value("leasehold_fleet_worker_state", worker="alpha", state="CONNECTED") == 1
    assert seen.value("leasehold_fleet_workers", state="CONNECTED") == 1
    assert seen.value("leasehold_fleet_gpus", worker="alpha", state="LEASED") == 1
    assert seen.value("leasehold_fleet_gpus", worker="alpha", state="FREE") == 1
    assert seen.value("leasehold_fleet_worker_last_frame_timestamp_seconds", worker="alpha")
    assert seen.value("leasehold_coordinator_sessions_total") == 1

    load.sequence = 2
    load.cordon.reason = "fan"
    worker.up.put(ConnectRequest(worker_load=load))
    cordoned = wait_for(
        address, lambda now: now.value("leasehold_fleet_gpus", worker="alpha", state="FREE") is None
    )
    assert cordoned.value("leasehold_fleet_gpus", worker="alpha", state="CORDONED") == 1
    assert cordoned.value("leasehold_fleet_gpus", worker="alpha", state="LEASED") == 1
    load.sequence = 3
    load.ClearField("cordon")
    worker.up.put(ConnectRequest(worker_load=load))
    wait_for(address, lambda now: now.value("leasehold_fleet_gpus", worker="alpha", state="FREE") == 1)

    asked = CreateWorkloadRequest(name="one")
    asked.spec.arguments.append("true")
    coordinator.workloads.CreateWorkload(asked, timeout=TIMEOUT_S)
    running = wait_for(address, lambda now: now.value("leasehold_coordinator_commands_open") == 1)
    assert running.value("leasehold_fleet_workloads", worker="alpha", state="PENDING") == 1
    worker.succeed("run")
    done = {"verb": "run", "outcome": "SUCCEEDED"}
    ended = wait_for(
        address, lambda now: now.value("leasehold_coordinator_command_duration_seconds_count", **done) == 1
    )
    assert ended.value("leasehold_coordinator_store_commit_duration_seconds_count")
    assert ended.value("leasehold_coordinator_store_read_duration_seconds_count")
    assert promtool("check", "metrics", text=scrape_text(address)) == ""


@pytest.mark.long
def test_refused_and_silent_connections_keep_no_scrape_out(
    coordinator: CoordinatorProcess, address: str
) -> None:
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    silent = [socket.create_connection(place, TIMEOUT_S) for _ in range(3 * CONNECTIONS)]
    assert scrape(address).value("leasehold_coordinator_info") == 1
    for connection in silent:
        connection.close()
    for method, path, status in (
        ("GET", "/", 404),
        ("POST", "/metrics", 405),
        ("HEAD", "/metrics", 200),
        ("GET", "/metrics?name=x", 200),
    ):
        assert request(address, method, path)[0] == status
    for sent, found in (
        (b"GET /metrics HTTP/2\r\n\r\n", b"400"),
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=x\x00\xff\r\n\r\n", b"200"),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"x" * 2 * HEAD_LIMIT_BYTES, b"431"),
    ):
        with socket.create_connection(place, TIMEOUT_S) as connection:
            connection.sendall(sent)
            assert connection.recv(4096).split()[1] == found, sent[:40]
    assert scrape(address).value("leasehold_coordinator_info") == 1


def client_context(holder: Holder, folder: Path) -> ssl.SSLContext:
    """TLS of a scraper with a certificate."""
    holder.write(folder, "client")
    context = ssl.create_default_context(cadata=holder.roots.decode())
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


def test_off_loopback_a_scrape_needs_a_certificate_with_a_role(tmp_path: Path) -> None:
    port = free_port()
    started = CoordinatorProcess(
        tmp_path, "0.0.0.0:0", "0.0.0.0:0", options=["--metrics-listen", f"0.0.0.0:{port}"]
    )
    database, address = tmp_path / "store.sqlite3", f"127.0.0.1:{port}"
    names = ("service/prometheus", "user/nobody", "user/mallory", "worker/alpha")
    holders = enrol(database, credentials_directory(), *names)
    bindings = [
        RoleBinding(identity=name, role=ROLE_VIEWER) for name in ("service/prometheus", "user/mallory")
    ]
    write_rows(
        database, revocation_row(Revocation("user/mallory", "local/root", 1)), *map(binding_row, bindings)
    )
    started.start()
    tls = [client_context(holder, tmp_path / holder.issued.serial) for holder in holders]
    try:
        assert scrape(address, tls[0]).value("leasehold_coordinator_info") == 1
        for context, why in zip(
            tls[1:], ("has no role", "is blocked", "for users and services"), strict=True
        ):
            status, _, body = request(address, tls=context)
            assert status == 403, body
            assert why in body
        without = ssl.create_default_context(cadata=holders[0].roots.decode())
        with pytest.raises((ssl.SSLError, ConnectionError)):
            request(address, tls=without)
        with pytest.raises((ConnectionError, OSError)):
            request(address)
        assert scrape(address, tls[0]).value("leasehold_coordinator_info") == 1
    finally:
        assert started.end(signal.SIGTERM) == 0
    assert "Traceback" not in started.log()


def reported(hello: Hello, session_id: SessionId | None) -> KnownWorker:
    """A worker that has reported just now."""
    return KnownWorker(
        hello, 1, session_id, reported=True, last_seen=time.monotonic(), leases=hello.gpu_leases
    )


def test_a_large_fleet_leaves_the_event_loop_free(tmp_path: Path) -> None:
    """The gauges of 1,000 workers are read in turns: other tasks run between them."""

    async def read() -> None:
        store = Store.open(str(tmp_path / "store.sqlite3"))
        try:
            fleet = Fleet(store, 5.0, open_vault(tmp_path))
            for number in range(1_000):
                hello = make_hello(f"worker-{number}", 8)
                fleet.registry.add(reported(hello, SessionId("s")))
            turns = 0

            async def count_turns() -> None:
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            counter = asyncio.create_task(count_turns())
            gauges = FleetGauges(fleet, dict)
            families = {family.name: family for family in await gauges.read()}
            assert turns >= 10
            before = turns
            assert await gauges.read() is await gauges.read(), "a reading serves further scrapes"
            counter.cancel()
            assert turns - before < 10
            gpus = families["leasehold_fleet_gpus"].samples
            assert len(gpus) == 1_000, "a state without GPUs has no series"
            assert sum(sample.value for sample in gpus) == 8_000
            assert sum(len(family.samples) for family in families.values()) < 10_000
        finally:
            store.close()

    asyncio.run(read())


def test_workers_of_one_name_have_one_series(tmp_path: Path) -> None:
    """A lost worker's name may be taken by another worker. Two equal series would fail the whole scrape."""

    async def read() -> None:
        store = Store.open(str(tmp_path / "store.sqlite3"))
        try:
            fleet = Fleet(store, 5.0, open_vault(tmp_path))
            for worker_id, session in (("worker-1", None), ("worker-2", SessionId("s")), ("worker-3", None)):
                hello = make_hello("alpha", worker_id=worker_id)
                fleet.registry.add(reported(hello, session))
            families = {family.name: family for family in await FleetGauges(fleet, dict).read()}
            assert len(families["leasehold_fleet_worker_state"].samples) == 1
            assert len(families["leasehold_fleet_gpus"].samples) == 1
            assert sum(sample.value for sample in families["leasehold_fleet_workers"].samples) == 1
        finally:
            store.close()

    asyncio.run(read())


def test_a_port_in_use_and_a_bad_address_are_one_line(tmp_path: Path, address: str) -> None:
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        run = run_coordinator(
            *("--listen", "127.0.0.1:0", "--worker-listen", "127.0.0.1:0"),
            *("--database", str(tmp_path / "store.sqlite3"), "--metrics-listen", address),
        )
    assert run.returncode == 2
    assert (
        f"can't listen on {address}: the port is in use; choose another with --metrics-listen" in run.stderr
    )
    settings = tmp_path / "coordinator.toml"
    settings.write_text("")
    with pytest.raises(StartError, match="not HOST:PORT"):
        load_config(settings, metrics_listen="7406")
    assert load_config(settings, metrics_listen="0.0.0.0:7406").has_metrics_tls
    assert not load_config(settings, metrics_listen="insecure:0.0.0.0:7406").has_metrics_tls


def test_ended_connections_leave_no_second_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread can't be cancelled. Scrapes that end early must not take the threads of others."""
    started: list[None] = []
    go_on = threading.Event()

    def encode(_: object) -> bytes:
        started.append(None)
        assert go_on.wait(TIMEOUT_S)
        return b""

    monkeypatch.setattr(metrics_listener, "_TEXT", (encode, "text/plain"))

    async def gauges() -> list[Metric]:
        return []

    async def story() -> None:
        listener, address = open_listener("127.0.0.1:0")
        port = int(address.rpartition(":")[2])
        serving = asyncio.create_task(MetricsListener(gauges, None, _NOBODY).run(listener))
        writers = []
        try:
            for _ in range(3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
                writers.append(writer)
                for _ in range(CONNECTIONS):
                    writers.append((await asyncio.open_connection("127.0.0.1", port))[1])
                async with asyncio.timeout(TIMEOUT_S):
                    assert await reader.read() == b""  # ended by the others
            assert len(started) == 1
        finally:
            go_on.set()
            for writer in writers:
                writer.close()
            serving.cancel()

    asyncio.run(story())


def test_scrapes_at_once_share_the_next_one() -> None:
    read = 0
    first_read, go_on = asyncio.Event(), asyncio.Event()

    async def gauges() -> list[Metric]:
        nonlocal read
        read += 1
        first_read.set()
        await go_on.wait()
        return []

    async def story() -> None:
        listener, address = open_listener("127.0.0.1:0")
        port = int(address.rpartition(":")[2])
        serving = asyncio.create_task(MetricsListener(gauges, None, _NOBODY).run(listener))

        async def ask() -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\n\r\n")
            try:
                return await reader.read()
            finally:
                writer.close()

        asked = [asyncio.create_task(ask())]
        await first_read.wait()
        asked += [asyncio.create_task(ask()) for _ in range(CONNECTIONS - 1)]
        await asyncio.sleep(0.3)  # all of them are waiting
        go_on.set()
        async with asyncio.timeout(TIMEOUT_S):
            answers = await asyncio.gather(*asked)
        assert all(b"leasehold_coordinator_sessions_total" in one for one in answers)
        assert read == 2
        serving.cancel()

    asyncio.run(story())


_NOBODY = MetricsAccess(None, lambda _: Role.NONE)  # type: ignore[arg-type]  # nobody is asked without TLS
