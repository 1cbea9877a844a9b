"""The options of the coordinator's gRPC servers, and their bounds on connections."""

import resource
from typing import Final

MESSAGE_LIMIT_BYTES: Final = 262_144
"""Most bytes of a message. A larger message ends its stream, so peers check sizes before they send."""

RPC_LIMIT: Final = 28_672
"""Most concurrent calls of the gRPC server. Above the sum of the limits on calls and streams."""

WORKER_CONNECTIONS: Final = 24_576
CLIENT_CONNECTIONS: Final = 2_048
"""Most connections at the port for workers, and at each of the two ports for clients. gRPC closes further
ones at once."""

LEAST_CONNECTIONS: Final = 16
"""No bound is reduced to less."""

HANDSHAKE_TIMEOUT_MS: Final = 20_000
"""How long a connection may take until TLS and HTTP/2 are set up."""

IDLE_TIMEOUT_MS: Final = 300_000
"""How long a connection may have no call. gRPC's clients connect again at their next call."""

PAGE_CONNECTIONS: Final = 1_024
"""Most connections of browsers at the web page, with those in their TLS handshake."""

DESCRIPTORS: Final = (
    WORKER_CONNECTIONS + 2 * CLIENT_CONNECTIONS + 256 + 3 * (1_024 + 64) + PAGE_CONNECTIONS + 2 * 256 + 512
)
"""Open files of a coordinator with all connections: of workers, clients, OpenID Connect and enrolment, three
for each connection at the socket, browsers, both ends of the gRPC connection of each of the page's sessions,
and its own files."""

OPTIONS: Final[list[tuple[str, int]]] = [
    # Both sides send pings, since a network partition can be in one direction only.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # The timeout of a ping. With gRPC's default, a frozen peer is detected only after 60 s.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Without this setting, gRPC disconnects a client that pings on an idle stream for "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Bandwidth probing would let a sender buffer 4 MB for a stalled receiver.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # One connection can't use all places for calls. gRPC clients queue calls above this limit.
    ("grpc.max_concurrent_streams", 128),
    # A second coordinator on the same port must fail to start instead of sharing the port.
    ("grpc.so_reuseport", 0),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
    ("grpc.max_connection_idle_ms", IDLE_TIMEOUT_MS),
]


def scaled(connections: int) -> int:
    """A bound on connections, reduced in proportion if the process may have too few open files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= DESCRIPTORS:
        return connections
    return max(min(connections, LEAST_CONNECTIONS), connections * limit // DESCRIPTORS)


def server_options(connections: int) -> list[tuple[str, int]]:
    """The options of one server.

    Args:
        connections: Most connections at each of its ports, if the process may have enough open files.
    """
    return [*OPTIONS, ("grpc.max_allowed_incoming_connections", scaled(connections))]
