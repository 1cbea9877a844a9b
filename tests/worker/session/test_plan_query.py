"""Dry runs that go wrong are answered, and end nothing."""

from typing import cast

from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.worker.v1.session_pb2 import PlanQuery
from leasehold_worker.operations.handler import Operations
from leasehold_worker.planning.durations import Durations
from leasehold_worker.session.plan_query import PlanQueries


class Broken:
    """Operations whose preflight has a defect."""

    @property
    def preflight(self) -> "Broken":
        return self

    async def suspend(self, *_: object) -> object:
        raise IndexError("of nothing")


async def test_a_defect_is_an_answer() -> None:
    query = PlanQuery(plan_id="p", workload_id="w", operation=Operation(suspend=SuspendOperation()))
    answer = await PlanQueries(cast(Operations, Broken()), Durations()).answer(query)
    assert (answer.plan_id, answer.error.reason) == ("p", errors_pb2.ERROR_REASON_INTERNAL)
