"""A client has a bounded number of streams, so that gRPC holds back no call without an error."""

import asyncio
import gc
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent import futures
from contextlib import AsyncExitStack, ExitStack, aclosing, closing, contextmanager, suppress
from typing import Any

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, fleet_service_pb2, workload_service_pb2
from leasehold_client import AsyncClient
from leasehold_client.aio import retry as async_retry
from leasehold_client.coordinator import open_streams, retry
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import UsageError

from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

REFUSED = "watches, waits and outputs of this client are open, which is its limit: end some"
RUNNING = command(command_pb2.COMMAND_STATE_RUNNING)


@pytest.fixture
def watched(scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCoordinator]:
    """A coordinator with watches that go on, for clients of three streams."""
    ended = threading.Event()

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        yield fleet_service_pb2.WatchFleetResponse(resume_token="1")
        context.add_callback(ended.set)
        ended.wait(30)

    monkeypatch.setattr(open_streams, "STREAM_LIMIT", 3)
    scripted.answers["WatchFleet"] = watch
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse()
    yield scripted
    ended.set()


def test_a_client_refuses_a_stream_beyond_its_limit(watched: ScriptedCoordinator) -> None:
    with Client(watched.address) as client, ExitStack() as stack:
        opened = [stack.enter_context(closing(client.watch_fleet())) for _ in range(3)]
        for one in opened:
            next(one)
        with pytest.raises(UsageError, match=f"^3 {REFUSED}"):
            next(client.watch_fleet())
        client.workers()
        with Client(watched.address) as other:
            next(other.watch_fleet())
        opened[0].close()
        next(stack.enter_context(closing(client.watch_fleet())))


def test_an_asynchronous_client_refuses_a_stream_beyond_its_limit(watched: ScriptedCoordinator) -> None:
    async def main() -> None:
        async with AsyncClient(watched.address) as client, AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(aclosing(client.watch_fleet())) for _ in range(3)]
            for one in opened:
                await anext(one)
            with pytest.raises(UsageError, match=f"^3 {REFUSED}"):
                await anext(client.watch_fleet())
            await client.workers()
            await opened[0].aclose()
            await anext(await stack.enter_async_context(aclosing(client.watch_fleet())))

    asyncio.run(main())


def test_a_wait_beyond_the_limit_makes_no_call(
    watched: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_streams, "STREAM_LIMIT", 1)
    calls: list[Callable[[Client], object]] = [
        lambda client: next(client.watch_workloads("one")),
        lambda client: next(client.watch_commands(workload="one")),
        lambda client: next(client.watch_events(workload="one")),
        lambda client: next(client.watch(RUNNING)),
        lambda client: client.wait(RUNNING),
        lambda client: client.wait_workload("one"),
        lambda client: next(client.output("one")),
        lambda client: next(client.output_parts("one")),
    ]
    with Client(watched.address) as client, closing(client.watch_fleet()) as first:
        next(first)
        for call in calls:
            with pytest.raises(UsageError, match=f"^1 {REFUSED}"):
                call(client)
    assert len(watched.requests) == 1


def places(client: Client | AsyncClient) -> int:
    """The number of free places of a client."""
    found = 0
    with ExitStack() as stack, suppress(UsageError):
        while True:
            stack.enter_context(client._connection.streams.entered())
            found += 1
    return found


@pytest.fixture
def broken(scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch) -> ScriptedCoordinator:
    """A coordinator that breaks the first stream of each kind after a response, for clients of one stream."""

    def breaking(*responses: Any) -> Callable[[Any, grpc.ServicerContext], Iterator[Any]]:
        calls = iter(range(100))

        def answer(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            number = next(calls)
            yield responses[min(number, len(responses) - 1)]
            if not number:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the test breaks the stream")

        return answer

    starting, ready = workload(), workload()
    starting.status.ClearField("ready_time")
    watch_command = command_service_pb2.WatchCommandResponse
    watch_workloads = workload_service_pb2.WatchWorkloadsResponse
    output = workload_service_pb2.ReadWorkloadOutputResponse
    monkeypatch.setattr(open_streams, "STREAM_LIMIT", 1)
    monkeypatch.setattr(retry, "RETRY_INTERVAL_S", 0.01)
    scripted.answers |= {
        "WatchFleet": breaking(
            fleet_service_pb2.WatchFleetResponse(resume_token="1"),
            fleet_service_pb2.WatchFleetResponse(resume_token="2"),
        ),
        "WatchCommand": breaking(
            watch_command(command=RUNNING),
            watch_command(command=command(command_pb2.COMMAND_STATE_SUCCEEDED, revision=2)),
        ),
        "WatchWorkloads": breaking(watch_workloads(workload=starting), watch_workloads(workload=ready)),
        "ReadWorkloadOutput": breaking(
            output(data=b"one", next_offset=3), output(data=b"two", next_offset=6)
        ),
    }
    return scripted


@pytest.mark.parametrize(
    ("use", "outcome"),
    [
        (lambda client: [response.resume_token for response in client.watch_fleet()], ["1", "2"]),
        (lambda client: [current.revision for current in client.watch(RUNNING)], [1, 2]),
        (lambda client: client.wait_workload("one").status.HasField("ready_time"), True),
        (lambda client: b"".join(client.output("one", follow=True)), b"onetwo"),
    ],
    ids=["watch", "command", "workload", "output"],
)
def test_a_stream_keeps_its_place_while_it_reopens(
    broken: ScriptedCoordinator,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Client], object],
    outcome: object,
) -> None:
    refused: list[Exception] = []

    def back_off_s(error: Exception, failures: int) -> float:
        """The wait between two calls of the stream, during which another stream begins."""
        with pytest.raises(UsageError, match=f"^1 {REFUSED}"), closing(client.watch_fleet()) as other:
            next(other)
        refused.append(error)
        return 0.0

    monkeypatch.setattr(retry, "back_off_s", back_off_s)
    with Client(broken.address) as client:
        assert use(client) == outcome
    assert len(refused) == 1


def test_an_asynchronous_stream_keeps_its_place_while_it_reopens(
    broken: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        free: list[int] = []

        def back_off_s(error: Exception, failures: int) -> float:
            free.append(places(client))
            return 0.0

        monkeypatch.setattr(async_retry, "back_off_s", back_off_s)
        async with AsyncClient(broken.address) as client:
            assert [response.resume_token async for response in client.watch_fleet()] == ["1", "2"]
            assert [current.revision async for current in client.watch(RUNNING)] == [1, 2]
            assert (await client.wait_workload("one")).name == "one"
            assert b"".join([data async for data in client.output("one", follow=True)]) == b"onetwo"
        assert free == [0, 0, 0, 0]

    asyncio.run(main())


def test_an_iterator_gives_its_place_back_once(watched: ScriptedCoordinator) -> None:
    def dropped(client: Client) -> None:
        next(client.watch_fleet())

    def closed(client: Client) -> None:
        opened = client.watch_fleet()
        next(opened)
        assert places(client) == 2
        opened.close()
        opened.close()

    def never_begun(client: Client) -> None:
        client.watch_fleet()
        client.watch_fleet().close()

    def failed(client: Client) -> None:
        with closing(client.watch_fleet()) as opened:
            next(opened)
            with pytest.raises(ZeroDivisionError):
                opened.throw(ZeroDivisionError())

    def refused(client: Client) -> None:
        with pytest.raises(UsageError):
            next(client.watch_fleet(filter="\ud800"))

    with Client(watched.address) as client:
        for use in (dropped, closed, never_begun, failed, refused):
            use(client)
            gc.collect()
            assert places(client) == 3, use


def test_an_asynchronous_iterator_gives_its_place_back_once(watched: ScriptedCoordinator) -> None:
    async def dropped(client: AsyncClient) -> None:
        await anext(client.watch_fleet())

    async def closed(client: AsyncClient) -> None:
        opened = client.watch_fleet()
        await anext(opened)
        assert places(client) == 2
        await opened.aclose()
        await opened.aclose()

    async def never_begun(client: AsyncClient) -> None:
        client.watch_fleet()
        await client.watch_fleet().aclose()

    async def cancelled(client: AsyncClient) -> None:
        begun = asyncio.Event()

        async def watch() -> None:
            async for _ in client.watch_fleet():
                begun.set()

        task = asyncio.create_task(watch())
        await begun.wait()
        assert places(client) == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def main() -> None:
        async with AsyncClient(watched.address) as client:
            for use in (dropped, closed, never_begun, cancelled):
                await use(client)
                gc.collect()
                for _ in range(1000):  # the loop closes dropped iterators in tasks
                    if places(client) >= 3:
                        break
                    await asyncio.sleep(0.01)
                assert places(client) == 3, use

    asyncio.run(main())


class Peers(grpc.GenericRpcHandler):
    """A coordinator that notes the connection of each call."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
            self.seen.append(context.peer())
            return b""

        return grpc.unary_unary_rpc_method_handler(answer)


@contextmanager
def peers() -> Generator[tuple[str, Peers]]:
    """A coordinator without TLS. gRPC lets channels with the same credentials share a connection."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    handler = Peers()
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"insecure:127.0.0.1:{port}", handler
    server.stop(None).wait(10)


def test_each_client_has_a_connection_of_its_own() -> None:
    with peers() as (address, handler), Client(address) as one, Client(address) as other:
        for client in (one, other, one):
            client.workers()
    first, second, third = handler.seen
    assert first == third != second


def test_each_asynchronous_client_has_a_connection_of_its_own() -> None:
    async def main(address: str) -> None:
        async with AsyncClient(address) as one, AsyncClient(address) as other:
            for client in (one, other, one):
                await client.workers()

    with peers() as (address, handler):
        asyncio.run(main(address))
    first, second, third = handler.seen
    assert first == third != second
