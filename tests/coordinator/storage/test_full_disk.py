"""A store that can't be written is no fault of the workers: they come back soon, and nobody blames them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from leasehold.v1 import workload_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest, WorkloadEvent
from leasehold.worker.v1.session_pb2_grpc import SessionServiceStub

from tests.channels import open_aio_worker_channel, server_credentials
from tests.coordinator.bench import Bench, on_bench, workload
from tests.coordinator.pages import all_events
from tests.coordinator.scripted_worker import make_hello

REPORT = ConnectRequest(
    workload_event=WorkloadEvent(workload=workload(workload_pb2.WORKLOAD_STATE_RUNNING, 1))
)


@asynccontextmanager
async def stream_to(bench: Bench) -> AsyncIterator[Any]:
    """A stream on which hello was sent."""
    server = grpc.aio.server()
    bench.service.add_to(server)
    port = server.add_secure_port("127.0.0.1:0", server_credentials())
    await server.start()
    async with open_aio_worker_channel(f"127.0.0.1:{port}") as channel:
        call: Any = SessionServiceStub(channel).Connect()
        await call.write(ConnectRequest(hello=make_hello()))
        yield call
    await server.stop(None)


async def told(bench: Bench) -> list[str]:
    await bench.fleet.events.flush()
    return [event.message for event in await all_events(bench.store)]


def test_a_worker_whose_report_cannot_be_stored_comes_back_soon(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        async with stream_to(bench) as call:
            assert (await call.read()).HasField("welcome")
            with pytest.MonkeyPatch.context() as monkeypatch:
                bench.fail_writes(monkeypatch)
                await call.write(REPORT)
                drain = (await call.read()).drain
            assert 2 <= drain.reconnect_after.ToTimedelta().total_seconds() <= 6
            assert await call.read() is grpc.aio.EOF
        assert not [message for message in await told(bench) if "disk" in message]

    on_bench(tmp_path, scenario)


def test_a_worker_that_cannot_be_let_in_now_is_not_refused(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            bench.fail_writes(monkeypatch)
            async with stream_to(bench) as call:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await call.read()
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the disk is full"
        assert not [message for message in await told(bench) if "disk" in message]

    on_bench(tmp_path, scenario)
