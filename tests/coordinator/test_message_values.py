"""The remedy for a negative number names the least number that is accepted."""

import pytest
from google.protobuf.message import Message
from leasehold.v1.operation_pb2 import AdoptOperation
from leasehold.v1.workload_service_pb2 import AdoptProcessRequest, ListWorkloadsRequest
from leasehold_coordinator.message_values import find_problem


@pytest.mark.parametrize(
    ("message", "path", "text"),
    [
        (ListWorkloadsRequest(page_size=-1), "page_size", "-1 is negative: give a number from 0 on"),
        (
            AdoptProcessRequest(operation=AdoptOperation(pid=-1)),
            "operation.pid",
            "-1 is negative: give a number from 1 on",
        ),
    ],
)
def test_a_negative_number_is_told_with_the_least_one(message: Message, path: str, text: str) -> None:
    problem = find_problem(message)
    assert problem is not None
    assert (problem.path, problem.text) == (path, text)
