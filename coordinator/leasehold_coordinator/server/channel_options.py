"""The coordinator's gRPC server settings, in one place."""

from typing import Final

MESSAGE_LIMIT_BYTES: Final = 262_144
"""Frames are about 1 KB. A larger message would end the whole stream, so sizes are checked before sending."""

RPC_LIMIT: Final = 28_672
"""Calls and streams of workers and clients at once: more than all of them may have together."""

OPTIONS: Final[list[tuple[str, int]]] = [
    # Both sides ping: a partition can be one way.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # What watches an unanswered ping: without it a frozen peer is found after 60 s only.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Otherwise a client that pings on an idle stream is cut off for "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # Bandwidth probing lets a sender buffer 4 MB for a receiver that stalls.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
    # One connection can't take all of what is served: a client waits by itself for a free stream.
    ("grpc.max_concurrent_streams", 128),
    # Two coordinators on one port must fail, not share.
    ("grpc.so_reuseport", 0),
]
