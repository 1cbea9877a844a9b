"""A recording of what an older release sent and received, in the order of its events."""

import gzip
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Final, cast

import grpc
import msgspec

from tests.older_release import OLDER

FILE: Final = Path(__file__).with_name(f"{OLDER}.msgpack.gz")
LIMIT_BYTES: Final = 65_536
"""Most bytes of the file."""

GPU_SEED: Final = 18
"""Seed of the simulated host: its GPUs have the same UUIDs in the recording and in each replay."""

GPU_COUNT: Final = 2

CONNECT: Final = "/leasehold.worker.v1.SessionService/Connect"
"""The method of sessions."""

STATUS_KEY: Final = "grpc-status-details-bin"
"""The trailer of a refused call with its ``google.rpc.Status``."""

COUNTER: Final = "counter-of-the-recording"
"""The recorded program. Each host has its own on the search path of the worker."""


class Kind(StrEnum):
    """What happened."""

    CONNECT = "connect"
    """A worker opened a session."""
    UP = "up"
    """The worker sent a frame."""
    DOWN = "down"
    """The coordinator sent a frame."""
    REQUEST = "request"
    """A client made a call."""
    RESPONSE = "response"
    """The coordinator sent a response to a call."""
    PAUSE = "pause"
    """All frames and calls before have been handled."""
    REFUSAL = "refusal"
    """The coordinator refused a call. The content is a ``google.rpc.Status``."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """One event.

    Attributes:
        kind: What happened.
        content: The bytes of the message.
        call: Number of the call. 0: of no call.
        method: Path of the method, as gRPC names it. Empty: of no call.
    """

    kind: Kind
    content: bytes = b""
    call: int = 0
    method: str = ""


def status_of(error: grpc.RpcError) -> bytes:
    """The ``google.rpc.Status`` of a refused call."""
    trailers = cast("grpc.Call", error).trailing_metadata()
    return next(value for key, value in cast("Iterable[tuple[str, bytes]]", trailers) if key == STATUS_KEY)


def load() -> list[Event]:
    """The recorded events."""
    return msgspec.msgpack.decode(gzip.decompress(FILE.read_bytes()), type=list[Event])


def save(events: list[Event]) -> int:
    """Writes the file, and returns its size in bytes."""
    packed = gzip.compress(msgspec.msgpack.encode(events), mtime=0)
    assert len(packed) <= LIMIT_BYTES, f"{len(packed)} bytes, of {LIMIT_BYTES}: record less"
    FILE.write_bytes(packed)
    return len(packed)
