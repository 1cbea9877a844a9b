"""The health service follows the store, and nobody waits for ever for a disk that hangs."""

import signal
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, GetWorkloadRequest
from leasehold_coordinator.server.listeners import SERVICES

from tests.coordinator.api.test_command_service import SPEC, refusal, start, suspend
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "STORAGE_UNAVAILABLE")

QUICK = """
from leasehold_coordinator.server import server
from leasehold_coordinator.storage import write_health
write_health.STALL_S, server.PRUNE_INTERVAL_S = 0.5, 0.2
"""


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    """A coordinator that notices soon that its disk hangs, and writes all the time."""
    started = CoordinatorProcess(tmp_path, prelude=QUICK)
    started.start()
    yield started
    for worker in started.workers:
        worker.close()
    assert started.end(signal.SIGTERM) == 0


@contextmanager
def hanging_disk(coordinator: CoordinatorProcess) -> Iterator[None]:
    """Writes of the coordinator wait for another process's transaction."""
    with closing(sqlite3.connect(coordinator.folder / "store.sqlite3", timeout=20)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.rollback()


class Watch:
    """A watch of the health of one service."""

    def __init__(self, coordinator: CoordinatorProcess, service: str) -> None:
        watch: grpc.UnaryStreamMultiCallable[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]
        watch = coordinator.channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self.call = watch(health_pb2.HealthCheckRequest(service=service), timeout=60)

    def wait(self, status: int) -> None:
        """Waits until the watch tells this status."""
        for response in self.call:
            if response.status == status:
                return
        raise AssertionError(status)


def test_health_follows_a_store_that_hangs(coordinator: CoordinatorProcess) -> None:
    watches = [Watch(coordinator, service) for service in ("", *SERVICES)]
    for watch in watches:
        watch.wait(SERVING)
    with hanging_disk(coordinator):
        for watch in watches:
            watch.wait(NOT_SERVING)
    for watch in watches:
        watch.wait(SERVING)
        watch.call.cancel()


def test_health_follows_a_store_that_refuses(coordinator: CoordinatorProcess) -> None:
    store, away = coordinator.folder / "store.sqlite3", coordinator.folder / "away"
    watch = Watch(coordinator, "")
    watch.wait(SERVING)
    store.rename(away)
    watch.wait(NOT_SERVING)
    away.rename(store)
    watch.wait(SERVING)
    watch.call.cancel()


def test_a_request_is_refused_while_the_disk_hangs_and_is_done_once(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    start(coordinator, worker)
    request = CreateWorkloadRequest(request_id="r-1", name="two", spec=SPEC)
    watch = Watch(coordinator, "")
    with hanging_disk(coordinator), ThreadPoolExecutor(1) as aside:
        created = aside.submit(coordinator.workloads.CreateWorkload, request, timeout=30)
        assert refusal(lambda: created.result(20)) == UNAVAILABLE
        watch.wait(NOT_SERVING)
        assert refusal(lambda: suspend(coordinator)) == UNAVAILABLE
        workload = coordinator.workloads.GetWorkload(GetWorkloadRequest(workload="one"), timeout=20).workload
        assert workload.name == "one", "reads are served"
    watch.wait(SERVING)
    answer = coordinator.workloads.CreateWorkload(request, timeout=20)
    commands = coordinator.commands.ListCommands(ListCommandsRequest()).commands
    mine = [command.command_id for command in commands if command.request_id == "r-1"]
    assert mine == [answer.command.command_id]
    worker.wait(lambda frame: frame.command.command.command_id == mine[0])
    watch.call.cancel()
