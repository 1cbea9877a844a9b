"""Refused calls leave nothing for the garbage collector, which would stop all calls of others."""

import asyncio
import gc

import grpc
import pytest
from leasehold.v1 import errors_pb2
from leasehold_coordinator.api.error_statuses import abort
from leasehold_coordinator.api.rpc_errors import Context
from leasehold_coordinator.errors import FleetError

CALLS = 20


async def refused_calls() -> list[object]:
    """The exceptions in reference cycles after a number of refused calls."""

    async def refuse(request: bytes, context: Context) -> bytes:
        try:
            raise FleetError(errors_pb2.ERROR_REASON_UNKNOWN_WORKER, "no such worker")
        except FleetError as error:
            ending = abort(context, error)
            del context
            await ending

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(refuse)
    handlers = {"Call": handler}
    server = grpc.aio.server(handlers=[grpc.method_handlers_generic_handler("test", handlers)])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test/Call")
        gc.collect()
        gc.disable()
        try:
            for _ in range(CALLS):
                with pytest.raises(grpc.aio.AioRpcError, match="no such worker"):
                    await call(b"", timeout=20)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return [one for one in gc.garbage if isinstance(one, (FleetError, grpc.aio.AbortError))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
            await server.stop(None)


def test_refused_calls_make_no_reference_cycles() -> None:
    assert len(asyncio.run(refused_calls())) < CALLS // 2, "the newest may be under way"
