"""The port for health checks, such as those of Kubernetes: without TLS and without identities."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, final

import grpc
import trio
from grpc_health.v1 import health_pb2

from leasehold_worker.errors import StartError
from leasehold_worker.local_api.call_threads import CallThreads, stop_server
from leasehold_worker.local_api.request_parser import parse
from leasehold_worker.local_api.tcp_listeners import require_bindable

logger = logging.getLogger(__name__)

SESSION: Final = "leasehold.session"
"""Name in the health service for the session with the coordinator."""

CONNECTIONS: Final = 16
CALLS: Final = 2
"""Most connections for health checks, and most calls of each: no connection keeps out the others.

A call takes a thread from its begin, also if its request does not arrive.
"""

MESSAGE_LIMIT_BYTES: Final = 1_024
"""Most bytes of a request, which is the name of a service."""

STOP_GRACE_S: Final = 1.0


@final
class HealthService:
    """Unary checks only. Watches without an identity could take all places for calls.

    Trio's thread answers each check. A worker whose trio thread hangs therefore fails its checks.

    Args:
        token: Trio's thread.
        is_connected: Whether there is a session with the coordinator. Called in trio's thread.
    """

    def __init__(self, token: trio.lowlevel.TrioToken, is_connected: Callable[[], bool]) -> None:
        self._token = token
        self._questions: dict[str, Callable[[], bool]] = {"": lambda: True, SESSION: is_connected}

    def handlers(self) -> grpc.GenericRpcHandler:
        """The method, for gRPC. It is UNIMPLEMENTED for others."""
        check = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=partial(parse, health_pb2.HealthCheckRequest),
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        service = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        return grpc.method_handlers_generic_handler(service, {"Check": check})

    def check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """The health of the worker, or of its session. NOT_FOUND: the name is unknown."""
        if (question := self._questions.get(request.service)) is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service: give '' or {SESSION}")
        try:
            is_serving = trio.from_thread.run_sync(question, trio_token=self._token)
        except trio.RunFinishedError:
            is_serving = False
        serving, not_serving = (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )
        return health_pb2.HealthCheckResponse(status=serving if is_serving else not_serving)


@asynccontextmanager
async def serve_health(address: str, is_connected: Callable[[], bool]) -> AsyncIterator[None]:
    """Serves health checks in the context.

    Args:
        address: HOST:PORT. Empty: there is no port.
        is_connected: Whether there is a session with the coordinator.

    Raises:
        StartError: The address can't be used.
    """
    if not address:
        yield
        return
    await require_bindable(address, "health checks", "--health-listen")
    threads = CallThreads(CONNECTIONS * CALLS, "health")
    server = grpc.server(
        threads,  # type: ignore[arg-type]  # gRPC only submits calls
        maximum_concurrent_rpcs=CONNECTIONS * CALLS,
        options=[
            ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
            ("grpc.max_allowed_incoming_connections", CONNECTIONS),
            ("grpc.max_concurrent_streams", CALLS),
            ("grpc.so_reuseport", 0),
        ],
    )
    service = HealthService(trio.lowlevel.current_trio_token(), is_connected)
    server.add_generic_rpc_handlers((service.handlers(),))
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:
        threads.end()
        raise StartError(
            f"can't listen on {address} for health checks: {error}; choose another with --health-listen"
        ) from error
    server.start()
    logger.info("listening on %s for health checks", address)
    try:
        yield
    finally:
        await stop_server(server, threads, STOP_GRACE_S)
