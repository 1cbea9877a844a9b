"""Ages in words."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold_client.top.ages import age_text, duration_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (0.9, "0 s"),
        (59, "59 s"),
        (60, "1 min"),
        (125, "2 min 5 s"),
        (605, "10 min"),
        (3_600, "1 h"),
        (7_500, "2 h 5 min"),
        (90_000, "1 d 1 h"),
        (10 * 86_400 + 5, "10 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_an_unset_time_is_unknown() -> None:
    assert age_text(Timestamp(), 1e9) == "?"
    assert age_text(Timestamp(seconds=10), 12.0) == "2 s"
