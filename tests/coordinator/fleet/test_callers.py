"""What is under way for each host, and that no host takes all of it."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from contextvars import copy_context
from pathlib import Path
from typing import Final

import grpc
import pytest
from leasehold.v1 import errors_pb2
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, WatchFleetRequest
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse
from leasehold_coordinator.access.callers import Caller
from leasehold_coordinator.access.identities import Identity, Kind
from leasehold_coordinator.api import session_service
from leasehold_coordinator.errors import FleetError
from leasehold_coordinator.fleet.callers import (
    CALL_LIMIT,
    LIST_LIMIT,
    STREAM_LIMIT,
    CallLimits,
    counted_caller,
    host_of,
    note_caller,
)

from tests.channels import open_aio_channel, open_channel
from tests.coordinator.api.test_command_service import refusal
from tests.coordinator.bench import Bench, on_bench, session_streams
from tests.coordinator.conftest import SHORT_REQUESTS, CoordinatorProcess
from tests.coordinator.scripted_worker import ScriptedWorker, make_hello
from tests.coordinator.stories.test_lifecycle import until

DEAF: Final = [
    ("grpc.http2.lookahead_bytes", 5),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a client that lets a server send hardly anything, unless the client reads."""


@pytest.mark.parametrize(
    ("peer", "host"),
    [("ipv4:10.0.0.1:7400", "ipv4:10.0.0.1"), ("ipv6:%5B::1%5D:7400", "ipv6:%5B::1%5D"), ("", "")],
)
def test_a_host_has_many_ports(peer: str, host: str) -> None:
    assert host_of(peer) == host


def counted_as(caller: Caller) -> str:
    """What a call of this caller counts by."""

    def call() -> str:
        note_caller(caller)
        return counted_caller()

    return copy_context().run(call)


def test_an_identity_has_its_limits_on_all_its_hosts_together() -> None:
    hosts = ("ipv4:192.0.2.1", "ipv4:192.0.2.2")
    assert {counted_as(Caller(Identity(Kind.USER, "a"), host)) for host in hosts} == {"user/a"}
    own = {counted_as(Caller(Identity(Kind.LOCAL, "root"), host, is_local_admin=True)) for host in hosts}
    assert own == {f"local/root at {host}" for host in hosts}


def test_a_host_has_as_many_calls_as_are_free() -> None:
    calls = CallLimits(10)
    with ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(calls.entered("user/a"))
        with pytest.raises(FleetError) as error, calls.entered("user/a"):
            pass
        assert error.value.reason == errors_pb2.ERROR_REASON_TOO_MANY_CALLS
        for _ in range(3):
            stack.enter_context(calls.entered("user/b"))
        with pytest.raises(FleetError), calls.entered("user/b"):
            pass
    for _ in range(3):
        with calls.entered("user/a"):
            pass


@pytest.mark.long
def test_watches_are_bounded_and_their_places_taken_back(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    channels = [
        open_channel(coordinator.address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(6)
    ]
    calls = []
    for number in range(STREAM_LIMIT // 2):
        watch: grpc.UnaryStreamMultiCallable[WatchFleetRequest, bytes] = channels[number % 6].unary_stream(
            "/leasehold.v1.FleetService/WatchFleet", WatchFleetRequest.SerializeToString
        )
        calls.append(watch(WatchFleetRequest(), timeout=60))
        next(calls[-1])
    assert refusal(lambda: next(coordinator.fleet.WatchFleet(WatchFleetRequest())))[1] == "TOO_MANY_CALLS"
    assert coordinator.fleet.ListWorkers(ListWorkersRequest()).workers, "other calls have places of their own"
    for call in calls:
        call.cancel()
    for channel in channels:
        channel.close()
    until(lambda: watches(coordinator))


def watches(coordinator: CoordinatorProcess) -> bool:
    call = coordinator.fleet.WatchFleet(WatchFleetRequest())
    try:
        return bool(next(call).worker.name)
    except grpc.RpcError:
        return False
    finally:
        call.cancel()


@pytest.mark.long
def test_one_connection_has_a_bounded_number_of_streams(
    coordinator: CoordinatorProcess, worker: ScriptedWorker
) -> None:
    """Calls without their message hold no place of others: the connection's own streams are used up first."""
    over = threading.Event()

    def never() -> Iterator[bytes]:
        over.wait(20)
        yield from ()

    with open_channel(coordinator.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        hold: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/leasehold.v1.FleetService/GetWorker"
        )
        held = [hold.future(never(), timeout=20) for _ in range(140)]
        crowded: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/leasehold.v1.FleetService/ListWorkers"
        )
        with pytest.raises(grpc.RpcError):
            crowded(b"", timeout=1)
        assert coordinator.fleet.ListWorkers(ListWorkersRequest(), timeout=5).workers
        for one in held:
            one.cancel()
        over.set()


@pytest.mark.long
def test_pages_that_no_client_reads_are_bounded(coordinator: CoordinatorProcess) -> None:
    """A client that never reads keeps the page of each list in the coordinator's memory."""
    path = "/leasehold.v1.CommandService/ListCommands"
    wanted = LIST_LIMIT // 2

    async def scenario() -> list[grpc.StatusCode]:
        async with open_aio_channel(coordinator.address, DEAF) as channel:
            held: list[grpc.aio.StreamUnaryCall[bytes, bytes]] = [
                channel.stream_unary(path)() for _ in range(LIST_LIMIT)
            ]
            ends = asyncio.as_completed([call.code() for call in held])
            return [await next(ends) for _ in range(wanted)]

    assert asyncio.run(scenario()) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * wanted


BARE_PATHS: Final = (
    "/leasehold.v1.FleetService/GetWorker",
    "/leasehold.v1.FleetService/WatchFleet",
    "/grpc.health.v1.Health/Check",
)
"""Calls that send their headers and nothing else."""


@pytest.mark.long
def test_a_host_has_at_most_as_many_calls_without_requests_as_are_free(
    coordinator: CoordinatorProcess,
) -> None:
    coordinator.end(signal.SIGTERM)
    coordinator.prelude = (
        "from leasehold_coordinator.api import rpc_errors; rpc_errors.REQUEST_TIMEOUT_S = 600"
    )
    coordinator.start()
    own = [("grpc.use_local_subchannel_pool", 1)]
    # A third of the calls is of the health service, whose calls are not counted.
    wanted = 8 * 80 - CALL_LIMIT // 2

    async def scenario() -> list[grpc.StatusCode]:
        async with AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_aio_channel(coordinator.address, own)) for _ in range(8)
            ]
            held: list[grpc.aio.StreamUnaryCall[bytes, bytes]] = [
                channel.stream_unary(path)() for channel in channels for path in BARE_PATHS for _ in range(40)
            ]
            ends = asyncio.as_completed([call.code() for call in held])
            return [await next(ends) for _ in range(wanted)]

    assert asyncio.run(scenario()) == [grpc.StatusCode.RESOURCE_EXHAUSTED] * wanted


def test_calls_without_their_requests_end_soon(coordinator: CoordinatorProcess) -> None:
    coordinator.prelude = SHORT_REQUESTS
    coordinator.restart()

    async def scenario() -> list[tuple[grpc.StatusCode, str]]:
        async with open_aio_channel(coordinator.address) as channel:
            held: list[grpc.aio.StreamUnaryCall[bytes, bytes]] = [
                channel.stream_unary(path)() for path in BARE_PATHS
            ]
            return [(await call.code(), str(await call.details())) for call in held]

    for code, details in asyncio.run(scenario()):
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "no request came: send it within" in details


@pytest.mark.parametrize(
    "path", ["/leasehold.v1.WorkloadService/GetWorkload", "/grpc.health.v1.Health/Check"]
)
def test_bytes_that_are_no_request_are_refused(coordinator: CoordinatorProcess, path: str) -> None:
    call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = coordinator.channel.unary_unary(path)
    assert refusal(lambda: call(b"\xff\xff", timeout=5))[0] == grpc.StatusCode.INVALID_ARGUMENT


def test_a_stream_whose_hello_is_late_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a refusal a worker stays away for a minute. A busy coordinator may be the one that is late."""

    async def scenario(bench: Bench) -> None:
        async with session_streams(bench) as connect:
            call = connect()
            with pytest.raises(grpc.aio.AioRpcError, match=r"no hello came within 0\.05 s: connect again"):
                await call.read()
            assert await call.code() == grpc.StatusCode.UNAVAILABLE
            monkeypatch.setattr(session_service, "HELLO_TIMEOUT_S", 20)
            again = connect()
            await again.write(ConnectRequest(hello=make_hello("late")).SerializeToString())
            answer = await again.read()
            assert isinstance(answer, bytes)
            assert ConnectResponse.FromString(answer).HasField("welcome")
            again.cancel()

    monkeypatch.setattr(session_service, "HELLO_TIMEOUT_S", 0.05)
    on_bench(tmp_path, scenario)


def test_streams_that_never_say_hello_are_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(bench: Bench) -> None:
        async with session_streams(bench) as connect:
            calls = [connect() for _ in range(5)]
            ended, _ = await asyncio.wait(
                [asyncio.ensure_future(call.code()) for call in calls], return_when=asyncio.FIRST_COMPLETED
            )
            assert ended.pop().result() == grpc.StatusCode.RESOURCE_EXHAUSTED

    monkeypatch.setattr(session_service, "HELLO_LIMIT", 8)
    on_bench(tmp_path, scenario)
