"""A client has a bounded number of streams, so that gRPC holds back no call without a word."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, aclosing, closing
from typing import Any

import grpc
import pytest
from leasehold.v1 import fleet_service_pb2
from leasehold_client import AsyncClient
from leasehold_client.coordinator import open_streams
from leasehold_client.coordinator.client import Client
from leasehold_client.errors import UsageError

from tests.client.scripted_coordinator import ScriptedCoordinator

REFUSED = "3 watches, waits and outputs of this client are open, which is the limit: end some"


@pytest.fixture
def watched(scripted: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedCoordinator]:
    """A coordinator with watches that go on, for clients of three streams."""
    ended = threading.Event()

    def watch(request: Any, context: grpc.ServicerContext) -> Iterator[fleet_service_pb2.WatchFleetResponse]:
        yield fleet_service_pb2.WatchFleetResponse()
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
        with pytest.raises(UsageError, match=REFUSED):
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
            with pytest.raises(UsageError, match=REFUSED):
                await anext(client.watch_fleet())
            await client.workers()
            await opened[0].aclose()
            await anext(await stack.enter_async_context(aclosing(client.watch_fleet())))

    asyncio.run(main())
