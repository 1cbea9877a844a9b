"""The worker's port for metrics: a real worker is scraped while it suspends and restores a workload."""

import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from leasehold.v1.operation_pb2 import CordonOperation, RestoreOperation, StopOperation, SuspendOperation
from leasehold_coordinator.access.authority import open_authority
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.config_file import load_config
from leasehold_worker.errors import StartError
from leasehold_worker.local_api import metrics_port
from leasehold_worker.local_api.metrics_port import CONNECTIONS, MetricsPort
from leasehold_worker.local_api.metrics_request import HEAD_LIMIT_BYTES
from leasehold_worker.local_api.metrics_tls import MetricsTls, MetricsTlsFiles

from tests.certificates import Holder, issue
from tests.ports import free_port
from tests.scrapes import TIMEOUT_S, promtool, request, scrape, scrape_text, wait_for
from tests.worker.conftest import WorkerProcess
from tests.worker.counters import counter_run, wait_counting
from tests.worker.scripted_coordinator import ScriptedCoordinator


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


def test_a_scrape_tells_of_gpus_and_operations(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    address: str,
) -> None:
    worker = start_worker(host, metrics_listen=address)
    session = coordinator.next_session()
    first = wait_for(address, lambda now: now.value("leasehold_worker_session_connected") == 1)
    uuid = host.gpus[0].uuid
    assert first.value("leasehold_gpu_info", UUID=uuid, worker="alpha", slot="0") == 1
    assert first.value("leasehold_gpu_lease_state", UUID=uuid, state="FREE") == 1
    assert first.value("leasehold_worker_operation_duration_seconds_count", outcome="SUCCEEDED") is None

    assert not session.run("c1", "w1", run=counter_run("one")).HasField("error")
    wait_counting(session, "w1", uuid)
    running = scrape(address)
    assert running.value("leasehold_gpu_lease_state", state="LEASED") == 1
    assert running.value("leasehold_worker_workloads", state="RUNNING") == 1

    assert not session.run("c2", "w1", suspend=SuspendOperation()).HasField("error")
    parked = scrape(address)
    assert parked.value("leasehold_gpu_lease_state", state="LEASED") == 0
    assert parked.value("leasehold_worker_members", state="CHECKPOINTED") == 1
    parked_bytes = parked.value("leasehold_worker_parked_bytes", tier="host_memory")
    assert parked_bytes
    assert parked.value("leasehold_worker_parked_oldest_seconds")
    done = {"verb": "suspend", "outcome": "SUCCEEDED"}
    assert parked.value("leasehold_worker_operation_duration_seconds_count", **done) == 1
    assert (
        parked.value("leasehold_worker_operation_phase_duration_seconds_count", phase="checkpoint", **done)
        == 1
    )
    assert parked.value("leasehold_worker_driver_call_duration_seconds_count", call="checkpoint") == 1
    assert (
        parked.value("leasehold_worker_operation_bytes_total", verb="suspend", medium="device")
        == parked_bytes
    )
    assert parked.value("leasehold_worker_switches_total", verb="suspend") == 1
    assert parked.value("leasehold_worker_switch_gpu_seconds_total", verb="suspend")

    refused = session.run(
        "c3", "w1", restore=RestoreOperation(gpu_uuids=["GPU-00000000-0000-0000-0000-000000000000"])
    )
    assert refused.HasField("error")
    assert not session.run("c4", "w1", restore=RestoreOperation()).HasField("error")
    assert not session.run("c5", "w1", stop=StopOperation()).HasField("error")
    last = scrape(address)
    assert last.value("leasehold_worker_operation_errors_total", verb="restore", reason="UNKNOWN_GPU") == 1
    assert last.value("leasehold_worker_parked_bytes") == 0
    assert last.value("leasehold_worker_parked_oldest_seconds") == 0
    assert last.value("leasehold_worker_journal_writable") == 1
    assert last.value("leasehold_worker_journal_commit_duration_seconds_count")
    assert last.value("leasehold_worker_driver_helper_starts_total")
    assert last.value("leasehold_worker_session_silence_seconds") is not None
    assert last.value("leasehold_worker_certificate_expiry_timestamp_seconds") is None, "unknown is absent"
    for family in last.families:
        for sample in family.samples:
            text = str(sample.labels)
            assert "w1" not in text, "no label names a workload"
            assert "one" not in text, "no label names a workload"

    assert not session.run("c6", "", cordon=CordonOperation(reason="fan")).HasField("error")
    cordoned = scrape(address)
    assert cordoned.value("leasehold_gpu_cordoned", UUID=uuid) == 1
    assert cordoned.value("leasehold_gpu_lease_state", UUID=uuid, state="CORDONED") == 1
    assert cordoned.value("leasehold_gpu_lease_state", UUID=uuid, state="FREE") == 0
    assert worker.stop() == 0


@pytest.mark.long
def test_the_scrape_is_clean_for_promtool(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    address: str,
) -> None:
    start_worker(host, metrics_listen=address)
    session = coordinator.next_session()
    wait_for(address, lambda now: now.value("leasehold_worker_session_connected") == 1)
    session.run("c1", "w1", run=counter_run("one"))
    wait_counting(session, "w1", host.gpus[0].uuid)
    session.run("c2", "w1", suspend=SuspendOperation())
    assert promtool("check", "metrics", text=scrape_text(address)) == ""


@pytest.mark.long
def test_refused_and_silent_connections_keep_no_scrape_out(
    start_worker: Callable[..., WorkerProcess], address: str
) -> None:
    start_worker(None, metrics_listen=address)
    wait_for(address, lambda _: True)
    place = ("127.0.0.1", int(address.rpartition(":")[2]))
    silent = [socket.create_connection(place, TIMEOUT_S) for _ in range(3 * CONNECTIONS)]
    assert scrape(address).value("leasehold_worker_info") == 1
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
    assert scrape(address).value("leasehold_worker_info") == 1


def client_context(holder: Holder, folder: Path) -> ssl.SSLContext:
    """TLS of a scraper with a certificate."""
    holder.write(folder, "client")
    context = ssl.create_default_context(cadata=holder.roots.decode())
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    return context


@pytest.mark.long
def test_off_loopback_a_scrape_needs_a_certificate_of_the_right_authority(
    start_worker: Callable[..., WorkerProcess], tmp_path: Path
) -> None:
    ours, others = (open_authority(new_folder(tmp_path / name)) for name in ("ours", "others"))
    server = ours.issue_server(["127.0.0.1"])
    files = {"certificate": server.chain, "key": server.key, "client_ca": ours.pem}
    settings = [f'metrics_listen = "0.0.0.0:{(port := free_port())}"']
    for name, content in files.items():
        path = tmp_path / f"{name}.pem"
        path.touch(0o600)
        path.write_bytes(content)
        settings.append(f'metrics_tls_{name} = "{path}"')
    (tmp_path / "worker.toml").write_text("\n".join(settings))
    worker = start_worker(None, config=str(tmp_path / "worker.toml"))
    address = f"127.0.0.1:{port}"
    friend = client_context(issue(ours, "service/prometheus"), tmp_path / "friend")
    wait_for(address, lambda _: True, friend)
    assert scrape(address, friend).value("leasehold_worker_info") == 1
    stranger = client_context(issue(others, "service/prometheus"), tmp_path / "stranger")
    stranger.load_verify_locations(cadata=ours.pem.decode())
    nobody = ssl.create_default_context(cadata=ours.pem.decode())
    for context in (stranger, nobody, None):
        with pytest.raises(OSError):  # ssl.SSLError is one, and so is a closed connection
            request(address, tls=context)
    assert scrape(address, friend).value("leasehold_worker_info") == 1
    assert worker.stop() == 0
    assert "Traceback" not in worker.log.read_text()


def test_changed_files_serve_new_connections_and_unusable_ones_do_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = open_authority(new_folder(tmp_path / "authority"))
    files = MetricsTlsFiles(*(tmp_path / f"{name}.pem" for name in ("certificate", "key", "client_ca")))
    with pytest.raises(StartError, match="metrics_tls_key and metrics_tls_client_ca can't be used"):
        MetricsTls(files)
    files.client_ca.write_bytes(authority.pem)

    def renew() -> None:
        server = authority.issue_server(["127.0.0.1"])
        files.certificate.write_bytes(server.chain)
        files.key.write_bytes(server.key)

    renew()
    tls = MetricsTls(files)
    first = tls.context
    tls.poll()
    assert tls.context is first
    renew()
    tls.poll()
    second = tls.context
    assert second is not first
    files.key.write_text("no key")
    tls.poll()
    assert tls.context is second
    assert "the previous ones stay" in caplog.text


def test_refused_files_are_read_again_without_a_later_modification(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A chmod or chown of a key changes neither size nor modification time."""
    authority = open_authority(new_folder(tmp_path / "authority"))
    files = MetricsTlsFiles(*(tmp_path / f"{name}.pem" for name in ("certificate", "key", "client_ca")))
    files.client_ca.write_bytes(authority.pem)
    server = authority.issue_server(["127.0.0.1"])
    files.certificate.write_bytes(server.chain)
    files.key.write_bytes(server.key)
    tls = MetricsTls(files)
    first = tls.context
    files.key.write_bytes(b"\n" * len(server.key))
    os.utime(files.key, ns=(1, 1))
    for _ in range(3):
        tls.poll()
    assert tls.context is first
    assert caplog.text.count("the previous ones stay") == 1
    files.key.write_bytes(server.key)
    os.utime(files.key, ns=(1, 1))
    tls.poll()
    assert tls.context is not first


def new_folder(path: Path) -> Path:
    path.mkdir(mode=0o700)
    return path


def test_an_address_off_loopback_needs_tls_or_a_word(tmp_path: Path) -> None:
    settings = tmp_path / "worker.toml"
    settings.write_text("")
    with pytest.raises(StartError, match="off loopback, and has no TLS"):
        load_config(settings, metrics_listen="0.0.0.0:7407")
    assert load_config(settings, metrics_listen="insecure:0.0.0.0:7407").metrics_address == "0.0.0.0:7407"
    with pytest.raises(StartError, match="not HOST:PORT"):
        load_config(settings, metrics_listen="7407")
    settings.write_text('metrics_listen = "0.0.0.0:7407"\nmetrics_tls_key = "/key.pem"\n')
    with pytest.raises(StartError, match="belong together"):
        load_config(settings)


@pytest.mark.long
def test_a_port_in_use_is_one_line(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, address: str
) -> None:
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))):
        worker = start_worker(host, metrics_listen=address)
        assert worker.process.wait(timeout=TIMEOUT_S) == 2
    refusal = f"leasehold worker: can't listen on {address} for metrics: the port is in use; choose"
    assert refusal in worker.log.read_text()


def test_a_slow_answer_lets_no_further_connections_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread can't be cancelled, so the oldest connection may go on after its end was asked for."""
    started: list[None] = []
    go_on = threading.Event()

    def encode(_: object) -> bytes:
        started.append(None)
        assert go_on.wait(TIMEOUT_S)
        return b""

    monkeypatch.setattr(metrics_port, "_TEXT", (encode, "text/plain"))

    async def story() -> None:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        number = listener.socket.getsockname()[1]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, MetricsPort(list, None).serve, [listener])
            scrapers = [await trio.open_tcp_stream("127.0.0.1", number) for _ in range(3)]
            for scraper in scrapers:
                await scraper.send_all(b"GET /metrics HTTP/1.1\r\n\r\n")
            silent = [await trio.open_tcp_stream("127.0.0.1", number) for _ in range(3 * CONNECTIONS)]
            try:
                with trio.fail_after(TIMEOUT_S):
                    for connection in silent[: 2 * CONNECTIONS]:
                        assert await connection.receive_some() == b""
                assert len(started) == 1
            finally:
                go_on.set()
                for connection in (*scrapers, *silent):
                    connection.socket.close()
                nursery.cancel_scope.cancel()

    trio.run(story)
