"""Ages and rates in words. Pure."""

from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def duration_text(seconds: float) -> str:
    """Formats a duration with its two largest units, such as ``2 h 5 min``. A negative one is 0 s."""
    left = max(0, int(seconds))
    for number, (size, unit) in enumerate(_UNITS):
        if left >= size:
            text = f"{left // size} {unit}"
            smaller_size, smaller = (*_UNITS, (1, "s"))[number + 1]
            rest = left % size // smaller_size
            return f"{text} {rest} {smaller}" if rest and left < 10 * size else text
    return f"{left} s"


def age_text(moment: Timestamp, now_s: float) -> str:
    """Formats the time since a moment. "?": unset.

    Args:
        moment: The moment, by the clock of its writer.
        now_s: The present, in seconds of the Unix epoch.
    """
    return duration_text(now_s - moment.seconds) if moment.seconds else "?"
