"""The worker's port for health checks: a real worker answers clients without TLS and identity."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from leasehold_simgpu import SimulatedHost
from leasehold_worker.agent.config_file import load_config
from leasehold_worker.errors import StartError
from leasehold_worker.local_api.health_port import CALLS, CONNECTIONS, MESSAGE_LIMIT_BYTES, SESSION

from tests.health_checks import NOT_SERVING, SERVING, TIMEOUT_S, Prober, half_open_calls
from tests.ports import free_port
from tests.worker.conftest import WorkerProcess
from tests.worker.scripted_coordinator import ScriptedCoordinator


@pytest.fixture
def address() -> str:
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def prober(address: str) -> Iterator[Prober]:
    client = Prober(address)
    yield client
    client.channel.close()


def wait(prober: Prober, status: int) -> None:
    """Waits until the session has a status."""
    deadline = time.monotonic() + TIMEOUT_S
    while prober.check(SESSION) != status:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.long
def test_checks_tell_of_the_worker_and_of_its_session(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    coordinator: ScriptedCoordinator,
    address: str,
    prober: Prober,
) -> None:
    worker = start_worker(host, health_listen=address)
    coordinator.next_session()
    assert prober.check() == SERVING
    wait(prober, SERVING)
    coordinator.stop()
    wait(prober, NOT_SERVING)
    assert prober.check() == SERVING, "a worker without a coordinator serves its host"
    with half_open_calls(prober, CONNECTIONS * CALLS + 1):
        assert prober.check() == SERVING
    for service, code in (
        ("leasehold.unknown", grpc.StatusCode.NOT_FOUND),
        ("x" * (MESSAGE_LIMIT_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        with pytest.raises(grpc.RpcError) as refused:
            prober.check(service)
        assert refused.value.code() == code
    assert worker.stop() == 0


def test_a_worker_that_hangs_answers_no_check(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, address: str, prober: Prober
) -> None:
    worker = start_worker(host, health_listen=address)
    assert prober.check() == SERVING
    worker.process.send_signal(signal.SIGSTOP)
    with pytest.raises(grpc.RpcError) as late:
        prober.check(timeout_s=0.5)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    worker.process.send_signal(signal.SIGCONT)
    assert prober.check() == SERVING


@pytest.mark.parametrize(
    ("method", "code"),
    [("Check", grpc.StatusCode.INTERNAL), ("Watch", grpc.StatusCode.UNIMPLEMENTED)],
)
def test_refused_calls_have_no_lines_in_the_log(
    start_worker: Callable[..., WorkerProcess],
    host: SimulatedHost,
    address: str,
    prober: Prober,
    method: str,
    code: grpc.StatusCode,
) -> None:
    """The callers of this port have no identity, and could fill the disk."""
    worker = start_worker(host, health_listen=address)
    assert prober.check() == SERVING
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = prober.channel.unary_unary(
        f"/grpc.health.v1.Health/{method}"
    )
    with pytest.raises(grpc.RpcError) as refused:
        call(b"\xff", timeout=TIMEOUT_S)
    assert refused.value.code() == code
    assert worker.stop() == 0
    assert "Traceback" not in worker.log.read_text()


def test_a_port_in_use_is_one_line(
    start_worker: Callable[..., WorkerProcess], host: SimulatedHost, coordinator: ScriptedCoordinator
) -> None:
    worker = start_worker(host, health_listen=coordinator.address)
    assert worker.process.wait(timeout=TIMEOUT_S) == 2
    refusal = (
        f"can't listen on {coordinator.address} for health checks: the port is in use; choose another with"
    )
    log = worker.log.read_text()
    assert refusal in log
    assert "GRPC" not in log
    assert "add_port.cc" not in log


@pytest.mark.parametrize("address", ["7404", ":7404", "0.0.0.0:port", "0.0.0.0:65536"])
def test_an_invalid_address_is_refused(address: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match="is not HOST:PORT: write it like"):
        load_config(None, health_listen=address, state_dir=tmp_path)
