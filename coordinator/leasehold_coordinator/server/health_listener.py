"""The port for health checks, such as those of Kubernetes: without TLS and without identities."""

from typing import Final, final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from leasehold_coordinator.server.channel_options import server_options
from leasehold_coordinator.server.ports import add_port

CONNECTIONS: Final = 16
CALLS: Final = 2
"""Most connections for health checks, and most calls of each: no connection keeps out the others."""

MESSAGE_LIMIT_BYTES: Final = 1_024
"""Most bytes of a request, which is the name of a service."""

STOP_GRACE_S: Final = 1.0

UNKNOWN: Final = "unknown service: give '', or a name of docs/security.md"


@final
class HealthListener:
    """The server for health checks. It has no other service, and changes nothing.

    Args:
        health_servicer: Knows the health of each service.
    """

    def __init__(self, health_servicer: health.aio.HealthServicer) -> None:
        options = {
            **dict(server_options(CONNECTIONS)),
            "grpc.max_receive_message_length": MESSAGE_LIMIT_BYTES,
            "grpc.max_concurrent_streams": CALLS,
        }
        calls = CONNECTIONS * CALLS
        self._server = grpc.aio.server(options=[*options.items()], maximum_concurrent_rpcs=calls)
        health_pb2_grpc.add_HealthServicer_to_server(_Checks(health_servicer), self._server)

    async def start(self, address: str) -> str:
        """Serves on an address, with a port number in the place of port 0.

        Raises:
            StartError: The address can't be used.
        """
        found = add_port(self._server, address, "--health-listen", None)
        await self._server.start()
        return found

    async def stop(self) -> None:
        """Ends all calls after a grace period."""
        await self._server.stop(STOP_GRACE_S)


@final
class _Checks(health_pb2_grpc.HealthServicer):
    """Unary checks only. Watches without an identity could take all places for calls."""

    def __init__(self, health_servicer: health.aio.HealthServicer) -> None:
        self._health = health_servicer

    async def Check(  # noqa: N802 - gRPC's name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        """The health of a service. NOT_FOUND: the name is unknown."""
        context.set_details(UNKNOWN)  # the servicer aborts without a text of its own
        response = await self._health.Check(request, context)
        context.set_details("")
        return response
