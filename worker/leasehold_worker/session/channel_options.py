"""The worker's gRPC channel settings, in one place."""

from typing import Final

import grpc

KEEPALIVE_TIME_MS: Final = 10_000
KEEPALIVE_TIMEOUT_MS: Final = 5_000

OPTIONS: Final[list[tuple[str, int]]] = [
    # Both sides ping: a partition can be one way.
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # The timeout of a ping. With gRPC's default, a frozen peer is detected only after 60 s.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    # Bandwidth probing lets a sender buffer 4 MB for a receiver that stalls.
    ("grpc.http2.bdp_probe", 0),
    # Frames are about 1 KB.
    ("grpc.max_receive_message_length", 262_144),
    ("grpc.max_send_message_length", 262_144),
    # The channel's own back-off was 17 s late after an outage of 30 s.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 5_000),
    # Each worker has its own connection, also where several live in one process.
    ("grpc.use_local_subchannel_pool", 1),
]


def open_channel(coordinator: str) -> grpc.Channel:
    """A channel to HOST:PORT. It connects when it is first used."""
    return grpc.insecure_channel(coordinator, options=OPTIONS)
