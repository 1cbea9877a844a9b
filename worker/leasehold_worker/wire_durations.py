"""Durations of messages in seconds, whatever a peer put into them."""

from typing import Final

from google.protobuf.duration_pb2 import Duration

LONGEST_S: Final = 100 * 365 * 86_400.0
"""A hundred years. A longer wait is the same to everybody, and datetime can't hold much more."""


def seconds(duration: Duration) -> float:
    """A duration in seconds, negative ones too, within a hundred years.

    ``ToTimedelta`` raises for what it can't hold, so one field of a peer would end more than its own call.
    """
    return min(max(-LONGEST_S, duration.seconds + duration.nanos / 1e9), LONGEST_S)
