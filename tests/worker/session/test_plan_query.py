"""Dry runs that go wrong are answered, and end nothing."""

from typing import cast

from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.worker.v1.session_pb2 import PlanQuery
from leasehold_worker.planning.durations import Durations
from leasehold_worker.planning.preflight import Preflight
from leasehold_worker.session.plan_query import PlanQueries


class Broken:
    """A preflight with a defect."""

    async def suspend(self, *_: object) -> object:
        raise IndexError("of nothing")


async def unasked(*_: object) -> None:
    raise AssertionError


async def test_a_defect_is_an_answer() -> None:
    query = PlanQuery(plan_id="p", workload_id="w", operation=Operation(suspend=SuspendOperation()))
    answer = await PlanQueries(cast(Preflight, Broken()), Durations(), unasked, unasked).answer(query)
    assert (answer.plan_id, answer.error.reason) == ("p", errors_pb2.ERROR_REASON_INTERNAL)
