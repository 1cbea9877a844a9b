"""What one peer sends in masses costs no other its session or its calls."""

import asyncio
import signal
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from leasehold.v1 import command_pb2
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse
from leasehold_coordinator.api import session_service
from leasehold_coordinator.fleet.hello_bounds import HELLO_BURST
from leasehold_coordinator.fleet.session import FRAME_LIMIT

from tests.channels import open_aio_worker_channel, server_credentials
from tests.coordinator.bench import CONNECT, Bench, on_bench
from tests.coordinator.conftest import CoordinatorProcess
from tests.coordinator.fleet.test_callers import DEAF
from tests.coordinator.scripted_worker import make_hello


def test_many_cancellations_do_not_end_a_workers_session(tmp_path: Path) -> None:
    async def scenario(bench: Bench) -> None:
        command = await bench.send()
        await asyncio.gather(*(bench.dispatcher.cancel(command) for _ in range(FRAME_LIMIT)))
        assert not bench.session.ended.done()
        assert [frame.command.cancel for frame in bench.sent()] == [False, True]
        assert (await bench.stored()).state == command_pb2.COMMAND_STATE_DISPATCHED

    on_bench(tmp_path, scenario)


@pytest.mark.parametrize("first", [b"\xff\xff", ConnectRequest(hello=make_hello()).SerializeToString()])
def test_streams_whose_peer_reads_nothing_are_their_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes
) -> None:
    """gRPC can't end such a stream, also once it was refused or superseded."""

    async def deaf_streams(address: str) -> list[grpc.StatusCode]:
        """Opens five streams and reads nothing. Returns the codes of the first that have ended."""
        async with open_aio_worker_channel(address, DEAF) as channel:
            connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONNECT)
            calls = [connect() for _ in range(4)]
            for call in calls:
                await call.write(first)
            calls.append(connect())  # refused before it has written
            ends = [asyncio.ensure_future(call.code()) for call in calls]
            ended, open_still = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            for one in open_still:
                one.cancel()
            return [one.result() for one in ended]

    async def is_let_in(address: str) -> bool:
        async with open_aio_worker_channel(address) as channel:
            connect: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONNECT)
            call = connect()
            await call.write(ConnectRequest(hello=make_hello("beta")).SerializeToString())
            answer = await call.read()
            call.cancel()
            return isinstance(answer, bytes) and ConnectResponse.FromString(answer).HasField("welcome")

    async def scenario(bench: Bench) -> None:
        server = grpc.aio.server()
        bench.service.add_to(server)
        address = f"127.0.0.1:{server.add_secure_port('127.0.0.1:0', server_credentials())}"
        await server.start()
        try:
            assert await deaf_streams(address) == [grpc.StatusCode.RESOURCE_EXHAUSTED]
            async with asyncio.timeout(20):
                while not await is_let_in(address):  # the connection is gone, and so are its streams
                    pass
        finally:
            await server.stop(None)

    monkeypatch.setattr(session_service, "SESSION_LIMIT", 8)
    monkeypatch.setattr(session_service, "FLUSH_TIMEOUT_S", 0.1)
    on_bench(tmp_path, scenario)


SLOW = "from leasehold_coordinator.fleet import hello_bounds; hello_bounds.HELLOS_PER_S = 1e-6"
"""The allowance of sessions does not grow within a test."""


@pytest.mark.long
def test_a_worker_that_reconnects_in_a_loop_is_refused_before_its_hello_is_stored(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(tmp_path, prelude=SLOW)
    coordinator.start()
    for epoch in range(1, HELLO_BURST + 1):
        worker = coordinator.connect()
        assert worker.welcome().epoch == epoch
        worker.close()
    for _ in range(3):
        refused = coordinator.connect()
        refused.wait_ended()
        status = rpc_status.from_call(refused.call)
        assert status is not None
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert not refused.frames
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(info)
        assert info.metadata["bound"] == "worker_hellos"
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.seconds > 0
    coordinator.connect(make_hello("beta")).welcome()
    coordinator.restart()
    assert coordinator.connect().welcome().epoch == HELLO_BURST + 1, "the refused hellos were not stored"
    for one in coordinator.workers:
        one.close()
    assert coordinator.end(signal.SIGTERM) == 0
