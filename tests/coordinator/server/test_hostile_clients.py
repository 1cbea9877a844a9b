"""One client floods the coordinator, and another one's calls go on."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, cast

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1 import access_service_pb2, access_service_pb2_grpc
from leasehold.v1.access_service_pb2 import RoleBinding
from leasehold.v1.command_service_pb2 import ListCommandsRequest
from leasehold.v1.command_service_pb2_grpc import CommandServiceStub
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.v1.fleet_service_pb2_grpc import FleetServiceStub
from leasehold.v1.workload_pb2 import Resources, Workload, WorkloadSpec
from leasehold.v1.workload_service_pb2 import CreateWorkloadRequest, UpdateWorkloadRequest
from leasehold.v1.workload_service_pb2_grpc import WorkloadServiceStub
from leasehold_client.config import credentials_directory
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import LeaseholdError
from leasehold_coordinator.fleet.callers import STREAM_LIMIT
from leasehold_coordinator.storage.rows import binding_row

from tests.certificates import enrol, write_rows
from tests.channels import Options
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.fleet.test_callers import DEAF
from tests.coordinator.stories.test_lifecycle import until

NAMES: Final = ("user/alice", "user/mallory")
TIMEOUT_S: Final = 60


class World:
    """A coordinator for other hosts with these settings, and two users of it."""

    def __init__(self, folder: Path, settings: str = "", prelude: str = "") -> None:
        path = folder / "coordinator.toml"
        path.write_text(settings)
        database = folder / "store.sqlite3"
        options = ["--config", str(path)]
        self.coordinator = CoordinatorProcess(
            folder, "0.0.0.0:0", "127.0.0.1:0", prelude=prelude, options=options
        )
        self.alice, self.mallory = enrol(database, credentials_directory(), *NAMES)
        roles = [RoleBinding(identity=name, role=access_service_pb2.ROLE_USER) for name in NAMES]
        write_rows(database, *map(binding_row, roles))
        self.coordinator.start()
        self.address = f"127.0.0.1:{self.coordinator.address.rpartition(':')[2]}"
        self.quiet = self.alice.open_channel(self.address)
        self.channels: list[grpc.Channel] = [self.quiet]

    def hostile(self, options: Options = ()) -> grpc.Channel:
        """A connection of the hostile user."""
        self.channels.append(self.mallory.open_channel(self.address, options))
        return self.channels[-1]

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for worker in self.coordinator.workers:
            worker.close()
        assert self.coordinator.end(signal.SIGTERM) == 0
        assert "Traceback" not in self.coordinator.log()


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A coordinator with low bounds, which a slow machine reaches too."""
    settings = "caller_requests_per_s = 20\ncaller_bytes_per_s = 50_000\ncaller_streams = 3\n"
    started = World(tmp_path_factory.mktemp("strict"), settings)
    yield started
    started.close()


def refused_by(call: Callable[[], object]) -> str:
    """The bound that refuses a call. Empty: the call succeeds."""
    try:
        call()
    except grpc.RpcError as error:
        failed = cast("grpc.Call", error)
        assert failed.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, failed.details()
        status = rpc_status.from_call(failed)
        assert status is not None
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert [detail for detail in status.details if detail.Unpack(info)]
        assert [detail for detail in status.details if detail.Unpack(retry)]
        assert retry.retry_delay.ToNanoseconds() > 0
        return str(info.metadata["bound"])
    return ""


def flood(stub: FleetServiceStub) -> None:
    """Sends lists, many at once, until a bound has refused some."""
    count = 0
    while count < 10:
        calls = [stub.ListWorkers.future(ListWorkersRequest(), timeout=TIMEOUT_S) for _ in range(100)]
        found = [refused_by(call.result) for call in calls]
        assert {*found} <= {"", "caller_requests_per_s"}
        count += found.count("caller_requests_per_s")


@pytest.mark.long
def test_a_flood_of_requests_leaves_room_for_others(strict: World) -> None:
    hostile, quiet = FleetServiceStub(strict.hostile()), FleetServiceStub(strict.quiet)
    for _ in range(2):
        flood(hostile)
        quiet.ListWorkers(ListWorkersRequest(), timeout=TIMEOUT_S)


def test_a_flood_of_bytes_leaves_room_for_others(strict: World) -> None:
    stub = WorkloadServiceStub(strict.hostile())
    large = Workload(workload_id="none", annotations={"note": "x" * 200_000})

    def send() -> None:
        try:
            stub.UpdateWorkload(UpdateWorkloadRequest(workload=large), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            if cast("grpc.Call", error).code() is not grpc.StatusCode.NOT_FOUND:
                raise

    until(lambda: refused_by(send) == "caller_bytes_per_s")
    FleetServiceStub(strict.quiet).ListWorkers(ListWorkersRequest(), timeout=TIMEOUT_S)


def test_a_client_tells_the_bound_on_the_streams_of_its_caller(
    strict: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict.mallory.write(tmp_path, "client")
    monkeypatch.setenv("LEASEHOLD_CREDENTIALS", str(tmp_path))
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(strict.address)) for _ in range(3)]
        for client in clients:
            next(stack.enter_context(closing(client.watch_fleet())))
        began_s = time.monotonic()
        with pytest.raises(
            LeaseholdError, match="user/mallory has 3 streams, and one caller may have 3"
        ) as told:
            next(clients[0].watch_fleet())
        assert time.monotonic() - began_s < 15, "and not after 30 s"
        assert told.value.metadata["bound"] == "caller_streams"


COSTLY: Final = """
from leasehold_coordinator.scheduling import planner
planner.DESCRIBED_PER_REQUEST = 0.001
"""
"""Prelude of a coordinator in which a refusal for lack of room costs 1,000 requests."""


def test_a_costly_refusal_uses_up_the_rate_of_its_caller_alone(tmp_path: Path) -> None:
    world = World(tmp_path, prelude=COSTLY)
    world.coordinator.connect().welcome()
    hostile, quiet = world.hostile(), WorkloadServiceStub(world.quiet)
    large = CreateWorkloadRequest(spec=WorkloadSpec(arguments=["true"], resources=Resources(gpu_count=9)))
    with pytest.raises(grpc.RpcError, match="requested 9 GPUs"):
        WorkloadServiceStub(hostile).CreateWorkload(large, timeout=TIMEOUT_S)
    lists = FleetServiceStub(hostile).ListWorkers
    assert refused_by(lambda: lists(ListWorkersRequest(), timeout=TIMEOUT_S)) == "caller_requests_per_s"
    with pytest.raises(grpc.RpcError, match="requested 9 GPUs"):
        quiet.CreateWorkload(large, timeout=TIMEOUT_S)
    world.close()


LONG_RESTS: Final = """
from leasehold_coordinator.fleet import caller_bounds
caller_bounds.LIST_SHARE, caller_bounds.LIST_BURST_S = 1e-9, 0.0
"""
"""Prelude of a coordinator in which each caller rests for long after a list."""


def test_lists_of_a_caller_rest_and_no_other_call_does(tmp_path: Path) -> None:
    world = World(tmp_path, prelude=LONG_RESTS)
    hostile, quiet = world.hostile(), world.quiet
    lists = CommandServiceStub(hostile).ListCommands
    lists(ListCommandsRequest(), timeout=TIMEOUT_S)
    with pytest.raises(grpc.RpcError) as error:
        lists(ListCommandsRequest(), timeout=1)
    assert cast("grpc.Call", error.value).code() is grpc.StatusCode.DEADLINE_EXCEEDED
    access_service_pb2_grpc.AccessServiceStub(hostile).WhoAmI(
        access_service_pb2.WhoAmIRequest(), timeout=TIMEOUT_S
    )
    CommandServiceStub(quiet).ListCommands(ListCommandsRequest(), timeout=TIMEOUT_S)
    world.close()


@pytest.mark.long
def test_a_flood_of_streams_leaves_room_for_others(strict: World) -> None:
    channel = strict.hostile()
    watching: list[grpc.Call] = []

    def watch(stub: FleetServiceStub) -> str:
        call = stub.WatchFleet(WatchFleetRequest(), timeout=TIMEOUT_S)
        watching.append(cast("grpc.Call", call))
        return refused_by(lambda: next(call))

    stub = FleetServiceStub(channel)
    found: list[str] = []
    while found.count("caller_streams") < 5:
        found.append(watch(stub))
    assert found.count("") == 3
    assert watch(FleetServiceStub(strict.quiet)) == ""
    for call in watching:
        call.cancel()
    until(lambda: watch(stub) == "")
    for call in watching:
        call.cancel()


@pytest.mark.long
def test_two_hundred_slow_readers_hold_up_nobody(tmp_path: Path) -> None:
    """Streams and pages that nobody reads stay charged to their caller, and end with its connections."""
    world = World(tmp_path)
    worker = world.coordinator.connect()
    worker.welcome()
    channels = [world.hostile(DEAF) for _ in range(4)]
    held: list[grpc.Future[object]] = []
    for number in range(200):
        channel = channels[number % 4]
        watch: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/leasehold.v1.FleetService/WatchFleet"
        )
        held.append(cast("grpc.Future[object]", watch.future(iter([b""]), timeout=TIMEOUT_S)))
    until(lambda: sum(call.done() for call in held) >= 200 - 64)
    workloads, commands = WorkloadServiceStub(world.quiet), CommandServiceStub(world.quiet)
    for number in range(20):
        spec = WorkloadSpec(arguments=["program"])
        request = CreateWorkloadRequest(name=f"n-{number}", spec=spec)
        assert workloads.CreateWorkload(request, timeout=TIMEOUT_S).command.command_id
        assert commands.ListCommands(ListCommandsRequest(), timeout=TIMEOUT_S).commands
        worker.report()
    assert sum(call.done() for call in held) == 200 - 64
    assert STREAM_LIMIT > 200, "so the bound of one caller refused them"
    for channel in channels:
        channel.close()

    def is_back() -> bool:
        call = FleetServiceStub(world.hostile()).WatchFleet(WatchFleetRequest(), timeout=TIMEOUT_S)
        return refused_by(lambda: next(call)) == ""

    until(is_back)
    world.close()
