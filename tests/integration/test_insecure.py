"""A coordinator with --insecure: who asks for it gets it, is told so everywhere, and needs the tokens.

The fleet `insecure` has no TLS, and so no certificates either.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator import retry
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError

from tests.coordinator.api.test_authentication import UNAUTHENTICATED, ending
from tests.coordinator.conftest import CoordinatorProcess
from tests.integration.fleets import Fleet, make_fleet

ENCRYPTION = health_pb2.HealthCheckRequest(service="leasehold.encryption")


@pytest.fixture(scope="module")
def insecure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet without TLS, with the worker alpha."""
    with make_fleet(tmp_path_factory.mktemp("insecure"), "--insecure") as fleet:
        fleet.start_worker("alpha", gpus=1)
        yield fleet


def encryption(channel: grpc.Channel, *metadata: tuple[str, str]) -> int:
    """What the health service says about the encryption."""
    check: grpc.UnaryUnaryMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    return check(ENCRYPTION, timeout=20, metadata=metadata).status


@pytest.mark.long
def test_workers_and_verbs_use_it_and_are_told(insecure: Fleet) -> None:
    assert insecure.address.startswith("insecure:127.0.0.1:")
    assert insecure.worker_address.startswith("insecure:127.0.0.1:")
    insecure.cli("cordon", "alpha/0", "--reason", "test")
    insecure.cli("uncordon", "alpha/0")
    assert re.search(r"^alpha +CONNECTED,insecure ", insecure.cli("get", "workers").stdout, re.MULTILINE)
    (worker,) = insecure.client.workers()
    assert worker.HasField("session_encrypted")
    assert not worker.session_encrypted
    assert "have no TLS, because of --insecure" in insecure.log("coordinator")
    assert "has no TLS: anybody on the network path" in insecure.log("alpha")


def test_whoever_listens_there_starts_no_programs_as_the_workers_user(insecure: Fleet) -> None:
    """Another user of the host may listen on the port while the coordinator is down."""
    refused = insecure.cli("run", "--worker", "alpha", "--", "true", code=1)
    assert "has no TLS, and the worker's run_as is not set" in refused.stderr


def test_the_tokens_are_asked_for(insecure: Fleet) -> None:
    with grpc.insecure_channel(insecure.address.removeprefix("insecure:")) as channel:
        stub = FleetServiceStub(channel)
        assert ending(lambda: stub.ListWorkers(ListWorkersRequest(), timeout=20)) == UNAUTHENTICATED
        token = (credentials_directory() / "client.token").read_text().strip()
        status = encryption(channel, ("authorization", f"Bearer {token}"))
    assert status == health_pb2.HealthCheckResponse.NOT_SERVING
    with grpc.insecure_channel(insecure.worker_address.removeprefix("insecure:")) as channel:
        connect: grpc.StreamStreamMultiCallable[bytes, bytes]
        connect = channel.stream_stream("/leasehold.worker.v1.SessionService/Connect")
        assert ending(lambda: next(connect(iter([b""]), timeout=20))) == UNAUTHENTICATED


def test_a_client_with_tls_is_told_the_address(insecure: Fleet) -> None:
    address = insecure.address.removeprefix("insecure:")
    refused = insecure.cli("get", "workers", "--coordinator", address, code=1)
    assert (
        f"does not speak TLS: correct the port, or write --coordinator {insecure.address}" in refused.stderr
    )


@pytest.mark.long
def test_a_worker_with_tls_is_told_the_address(insecure: Fleet) -> None:
    insecure.start_lost_worker("beta", insecure.worker_address.removeprefix("insecure:"))
    insecure.wait(lambda: f"write --coordinator {insecure.worker_address} if" in insecure.log("beta"))


@pytest.mark.long
def test_clients_and_workers_without_tls_are_told_the_address(
    empty_fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "REPEAT_LIMIT_S", 0.5)
    with Client(f"insecure:{empty_fleet.address}") as client, pytest.raises(LeaseholdError) as error:
        client.workers()
    assert error.value.message.endswith(f"that has TLS: write --coordinator {empty_fleet.address}")
    with empty_fleet.open_channel() as channel:
        assert encryption(channel) == health_pb2.HealthCheckResponse.SERVING
    address = empty_fleet.worker_address
    empty_fleet.start_lost_worker("alpha", f"insecure:{address}")
    empty_fleet.wait(lambda: f"that has TLS: write --coordinator {address}" in empty_fleet.log("alpha"))


def test_the_setting_is_the_flag(tmp_path: Path) -> None:
    (tmp_path / "coordinator.toml").write_text("insecure = true\n")
    coordinator = CoordinatorProcess(tmp_path, options=["--config", str(tmp_path / "coordinator.toml")])
    coordinator.start()
    assert coordinator.address.startswith("insecure:")
    assert os.environ.get("LEASEHOLD_COORDINATOR") is None
    with Client(coordinator.address) as client:
        assert client.workers() == []
    assert coordinator.end(signal.SIGTERM) == 0
