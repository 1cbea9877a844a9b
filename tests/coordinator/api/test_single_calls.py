"""Calls without an identity: those without a request take no place of others."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from leasehold.v1.enrolment_service_pb2 import JoinRequest, JoinResponse
from leasehold_coordinator.api import single_calls
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.api.single_calls import AWAITED_LIMIT, single_call

METHOD = "/test.Service/Join"


class Answering:
    """A server whose only method answers with the identity of the request."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def join(self, request: JoinRequest, context: Context) -> JoinResponse:
        self.asked.append(request.identity)
        return JoinResponse(coordinator=request.identity)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serves on an address."""
        server = grpc.aio.server()
        handlers = {"Join": single_call(JoinRequest, self.join)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Service", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(None)


async def send(channel: grpc.aio.Channel, identity: str) -> JoinResponse:
    call = channel.unary_unary(
        METHOD, request_serializer=bytes, response_deserializer=JoinResponse.FromString
    )
    response = await call(JoinRequest(identity=identity).SerializeToString(), timeout=20)
    assert isinstance(response, JoinResponse)
    return response


def test_silent_calls_keep_nobody_from_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_calls, "REQUEST_TIMEOUT_S", 100.0)

    async def scenario() -> None:
        service = Answering()
        async with service.serving() as address, grpc.aio.insecure_channel(address) as channel:
            silent: list[grpc.aio.StreamUnaryCall[bytes, bytes]] = [
                channel.stream_unary(METHOD)(timeout=60) for _ in range(AWAITED_LIMIT + 8)
            ]
            ended = [asyncio.ensure_future(call.code()) for call in silent]
            for call in silent:
                await call.wait_for_connection()
            done: set[asyncio.Future[grpc.StatusCode]] = set()
            async with asyncio.timeout(20):
                while len(done) < 8:
                    done, _ = await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.sleep(0.01)
            assert (await send(channel, "worker/alpha")).coordinator == "worker/alpha"
            assert {one.result() for one in done} == {grpc.StatusCode.INVALID_ARGUMENT}
            assert len([one for one in ended if one.done()]) <= 9, "the others still have their time"
            for call in silent:
                call.cancel()

    asyncio.run(scenario())
