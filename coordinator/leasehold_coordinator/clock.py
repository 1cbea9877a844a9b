"""The time, as records carry it."""

import time
from datetime import timedelta
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2


def _ahead_ns() -> int:
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


_FIRST_AHEAD_NS: Final = _ahead_ns()


def jumped_ns() -> int:
    """By how much the host's clock has jumped since the start of the coordinator: back where negative."""
    return _ahead_ns() - _FIRST_AHEAD_NS


def now_timestamp() -> timestamp_pb2.Timestamp:
    """The moment, to the nanosecond."""
    seconds, nanos = divmod(time.time_ns(), 10**9)
    return timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos)


def duration(seconds: float) -> duration_pb2.Duration:
    """A span of time."""
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def age_s(moment: timestamp_pb2.Timestamp) -> float:
    """Seconds since the moment."""
    return (time.time_ns() - moment.ToNanoseconds()) / 1e9


def is_storable(moment: timestamp_pb2.Timestamp) -> bool:
    """Whether a peer's timestamp is valid, and its nanoseconds fit into a column of 64 bits."""
    try:
        nanoseconds: int = moment.ToNanoseconds()
    except ValueError:
        return False
    return -(2**63) <= nanoseconds < 2**63
