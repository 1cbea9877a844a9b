"""Sizes, written and read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from leasehold_worker.byte_sizes import parse_size, size_text

from tests.examples import PATIENT


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        (" 12 B ", 12),
        ("1KiB", 1024),
        ("1kB", 1000),
        ("1.5 GiB", 3 * 2**29),
        ("1.5gib", 3 * 2**29),
        ("500 MB", 500_000_000),
        ("2TiB", 2**41),
        ("1PB", 10**15),
        ("0.3KiB", 307),
        ("0.1 GiB", 107_374_182),
        ("8191PiB", 8191 * 2**50),
    ],
)
def test_a_size_is_read_to_the_byte(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "8G",
        "8 Gi",
        "1e3",
        "1,5GiB",
        "1.GiB",
        "inf",
        "nan",
        "5 lightyears",
        "٣ GiB",
        "1 2",
    ],
)
def test_what_is_no_size_is_refused_with_the_remedy(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid size .*: .* like 1\.5GiB or 500MB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["8192PiB", "9223372036854775808", "9" * 400 + "PiB"])
def test_no_size_overflows(text: str) -> None:
    with pytest.raises(ValueError, match="larger than any host"):
        parse_size(text)


@PATIENT
@given(st.integers(min_value=0, max_value=2**62))
def test_a_size_that_was_written_is_read_again(size_bytes: int) -> None:
    assert parse_size(str(size_bytes)) == size_bytes
    again = parse_size(size_text(size_bytes))
    assert abs(again - size_bytes) <= size_bytes // 1000 + 1
