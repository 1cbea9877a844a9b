"""Which filters the coordinator evaluates."""

import pytest
from leasehold_client.top.plain_filter import contains_words, is_expression


@pytest.mark.parametrize(
    "text",
    [
        "state = FREE",
        "gpu_name:h100",
        "labels.rack=r1",
        'labels."a.b/c" = x',
        "NOT free_gpu_count >= 4",
        "state =",  # the coordinator says what it lacks
    ],
)
def test_expressions(text: str) -> None:
    assert is_expression(text)


@pytest.mark.parametrize("text", ["", "alpha", "alpha/0", "train-7 leased"])
def test_words(text: str) -> None:
    assert not is_expression(text)


def test_every_word_must_be_somewhere() -> None:
    assert contains_words(["alp", "free"], ["ALPHA", "FREE"])
    assert not contains_words(["alp", "leased"], ["ALPHA", "FREE"])
    assert not contains_words(["ab"], ["a", "b"])
