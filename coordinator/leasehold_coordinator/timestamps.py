"""Times and durations as protobuf messages."""

import time
from datetime import UTC, datetime, timedelta
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2


def _ahead_ns() -> int:
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


_FIRST_AHEAD_NS: Final = _ahead_ns()


def jumped_ns() -> int:
    """Jumps of the host's wall clock since the coordinator started, in total. Negative: backwards."""
    return _ahead_ns() - _FIRST_AHEAD_NS


_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def timestamp(time_ns: int) -> timestamp_pb2.Timestamp:
    """A time, given in nanoseconds of the Unix epoch."""
    seconds, nanos = divmod(time_ns, 10**9)
    return timestamp_pb2.Timestamp(seconds=seconds, nanos=nanos)


def unix_ns(moment: datetime) -> int:
    """A time as nanoseconds of the Unix epoch."""
    return (moment - _EPOCH) // timedelta(microseconds=1) * 1_000


def from_unix_ns(time_ns: int) -> datetime:
    """A time, given in nanoseconds of the Unix epoch, to the microsecond."""
    return _EPOCH + timedelta(microseconds=time_ns // 1_000)


def now_timestamp() -> timestamp_pb2.Timestamp:
    """The current time, to the nanosecond."""
    return timestamp(time.time_ns())


def duration(seconds: float) -> duration_pb2.Duration:
    """A duration, given in seconds."""
    message = duration_pb2.Duration()
    message.FromTimedelta(timedelta(seconds=seconds))
    return message


def age_s(moment: timestamp_pb2.Timestamp) -> float:
    """Seconds since a time."""
    return (time.time_ns() - moment.ToNanoseconds()) / 1e9


def is_storable(moment: timestamp_pb2.Timestamp) -> bool:
    """Whether a peer's timestamp is valid and fits into a column of 64 bits, in nanoseconds."""
    try:
        nanoseconds: int = moment.ToNanoseconds()
    except ValueError:
        return False
    return -(2**63) <= nanoseconds < 2**63
