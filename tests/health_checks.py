"""Health checks as Kubernetes makes them: without TLS and without an identity."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
from grpc_health.v1 import health_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
TIMEOUT_S = 40.0
OPTIONS = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),  # the daemon may just start
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 50),
]


class Prober:
    """A client of a port for health checks.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.address = address
        self.place = host, int(port)
        self.channel = grpc.insecure_channel(address, OPTIONS)
        self._check: grpc.UnaryUnaryMultiCallable[
            health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse
        ] = self.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    def check(self, service: str = "", timeout_s: float = TIMEOUT_S) -> int:
        """The status of a service."""
        request = health_pb2.HealthCheckRequest(service=service)
        return self._check(request, timeout=timeout_s, wait_for_ready=True).status

    def code(self, method: str) -> grpc.StatusCode:
        """The status with which a call of a method fails."""
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self.channel.unary_unary(method)
        try:
            call(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@contextmanager
def half_open_calls(prober: Prober, number: int) -> Iterator[None]:
    """Calls of another connection whose requests do not arrive. Some of them have reached the server."""
    begun, done = threading.Event(), threading.Event()

    def silence() -> Iterator[bytes]:
        begun.set()
        done.wait(TIMEOUT_S)
        yield from ()

    with grpc.insecure_channel(prober.address, OPTIONS) as channel:
        method: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(
            "/grpc.health.v1.Health/Check"
        )
        calls = [method.future(silence(), wait_for_ready=True) for _ in range(number)]
        try:
            grpc.channel_ready_future(channel).result(TIMEOUT_S)
            assert begun.wait(TIMEOUT_S)
            yield
            assert not all(call.done() for call in calls)
        finally:
            for call in calls:
                call.cancel()
            done.set()
