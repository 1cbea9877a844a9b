"""Sizes as people write them."""

import pytest
from leasehold_client.byte_sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("5B", 5),
        ("2KiB", 2048),
        ("2KB", 2000),
        ("8GiB", 8 * 2**30),
        ("8 gib", 8 * 2**30),
        (" 1.5MiB ", 3 * 2**19),
        ("1.5TB", 1_500_000_000_000),
        ("1TiB", 2**40),
        ("0.1KB", 100),
        ("0.3GiB", 322_122_547),
    ],
)
def test_a_number_and_a_unit(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", " ", "-1", "-1GiB", "nan", "inf", "GiB", "1G", "8XiB", "1e3", "1,5GiB", "1.GiB", "٣", "1 2"]
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: write a number and a unit, such as 8GiB"):
        parse_size(text)


def test_what_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="is too large"):
        parse_size("99999999999TiB")
