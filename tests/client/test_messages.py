"""Times, ages and spans as text."""

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold_client.messages import age_text, ago_text, moment_text, span_text

NOW_S = 1_000_000.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0s"),
        (0.9, "0s"),
        (119, "119s"),
        (120, "2m"),
        (7_199, "119m"),
        (7_200, "2h"),
        (2 * 86_400 + 5, "2d"),
    ],
)
def test_a_span_has_the_largest_unit_of_which_there_are_two(seconds: float, text: str) -> None:
    assert span_text(seconds) == text


@pytest.mark.parametrize(
    ("moment_s", "age", "ago", "moment"),
    [
        (999_700, "5m", "5m ago", "1970-01-12T13:41:40Z (5m ago)"),
        (1_000_003, "0s", "0s ago", "1970-01-12T13:46:43Z (0s ago)"),
        (1_000_300, "in 5m", "in 5m", "1970-01-12T13:51:40Z (in 5m)"),
        (0, "-", "-", "-"),
        (10**15, "?", "?", "?"),
    ],
    ids=["past", "clocks differ", "future", "unset", "outside of the calendar"],
)
def test_a_moment_is_told_by_its_distance(moment_s: int, age: str, ago: str, moment: str) -> None:
    told = Timestamp(seconds=moment_s)
    assert (age_text(told, NOW_S), ago_text(told, NOW_S), moment_text(told, NOW_S)) == (age, ago, moment)
