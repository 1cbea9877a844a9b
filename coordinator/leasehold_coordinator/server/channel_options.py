"""The options of the coordinator's gRPC server."""

from typing import Final

MESSAGE_LIMIT_BYTES: Final = 262_144
"""Most bytes of a message. A larger message ends its stream, so peers check sizes before they send."""

RPC_LIMIT: Final = 28_672
"""Most concurrent calls of the gRPC server. Above the sum of the limits on calls and streams."""

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
]
