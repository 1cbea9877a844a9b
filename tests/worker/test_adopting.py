"""What is told of processes that others started, and what a process may not be adopted with."""

import pytest
from leasehold_worker.workloads import ARGUMENTS_LIMIT, told_arguments


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], []),
        (["python", "train.py"], ["python", "train.py"]),
        (["x" * (ARGUMENTS_LIMIT + 1)], ["x" * (ARGUMENTS_LIMIT - 1) + "…"]),
        (["a", "b" * ARGUMENTS_LIMIT, "c"], ["a", "b" * (ARGUMENTS_LIMIT - 3) + "…"]),
        (["x" * (ARGUMENTS_LIMIT - 1), "a", "b"], ["x" * (ARGUMENTS_LIMIT - 1), "…"]),
    ],
)
def test_of_long_arguments_the_first_are_told(arguments: list[str], told: list[str]) -> None:
    assert told_arguments(arguments) == told
    assert sum(map(len, told)) <= ARGUMENTS_LIMIT
