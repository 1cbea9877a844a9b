"""Times and durations as messages of the protos, and back."""

from datetime import datetime
from typing import Final

from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.duration_pb2 import Duration


def timestamp(moment: datetime | None) -> timestamp_pb2.Timestamp | None:
    """A moment with its time zone, or None."""
    if moment is None:
        return None
    message = timestamp_pb2.Timestamp()
    message.FromDatetime(moment)
    return message


def duration(seconds: float) -> duration_pb2.Duration:
    """A span of time, to the nanosecond."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def epoch_seconds(moment: timestamp_pb2.Timestamp) -> float:
    """A moment in seconds of the Unix epoch, any value of a peer."""
    return moment.seconds + moment.nanos / 1e9


LONGEST_S: Final = 100 * 365 * 86_400.0
"""A hundred years. A longer wait makes no difference, and datetime can't hold much more."""


def seconds(duration: Duration) -> float:
    """A duration in seconds, negative ones too, within a hundred years.

    ``ToTimedelta`` raises for a value that it can't hold, so a peer's field could break more than its own
    call.
    """
    return min(max(-LONGEST_S, duration.seconds + duration.nanos / 1e9), LONGEST_S)
