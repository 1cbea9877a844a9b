"""Dry runs that go wrong are answered, and end nothing."""

from contextlib import ExitStack
from typing import cast

import pytest
import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.worker.v1.session_pb2 import ConnectRequest, ConnectResponse, PlanQuery, ReadOutput
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.errors import OperationError
from leasehold_worker.planning.durations import Durations
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.preflight import Preflight
from leasehold_worker.session.plan_query import PlanQueries
from leasehold_worker.session.queries import (
    PLAN_TIMEOUT_S,
    PLANS_AT_ONCE,
    PLANS_LIMIT,
    QUESTIONS_LIMIT,
    Queries,
)
from leasehold_worker.workloads.registry import Workloads
from trio.testing import MockClock

from tests.worker.planning.test_policy_checks import suspended


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


class Hanging:
    """A preflight that never ends for the workload "hangs"."""

    def __init__(self) -> None:
        self.begun = 0

    async def suspend(self, workload_id: str, *_: object) -> Plan:
        self.begun += 1
        if workload_id == "hangs":
            await trio.sleep_forever()
        return Plan([WorkloadPlan(suspended(0))])


def queries(preflight: object) -> Queries:
    plans = PlanQueries(cast(Preflight, preflight), Durations(), unasked, unasked)
    return Queries(cast(Workloads, None), plans, cast(CheckpointDirectory, None), "w")


def plan_query(workload_id: str) -> ConnectResponse:
    operation = Operation(suspend=SuspendOperation())
    return ConnectResponse(plan_query=PlanQuery(plan_id="p", workload_id=workload_id, operation=operation))


async def reason(asked: Queries, workload_id: str) -> int:
    """The reason of the refusal of a plan. 0: there is a plan."""
    answer = await asked.answer(plan_query(workload_id))
    assert isinstance(answer, ConnectRequest)
    assert answer.plan_answer.plan_id == "p"
    return answer.plan_answer.error.reason


async def test_a_plan_that_hangs_ends_at_its_deadline_and_delays_no_other(autojump_clock: MockClock) -> None:
    asked = queries(Hanging())
    reasons: list[int] = []

    async def ask() -> None:
        reasons.append(await reason(asked, "hangs"))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert await reason(asked, "w") == 0
        assert trio.current_time() == began
    assert reasons == [errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE]
    assert trio.current_time() - began == pytest.approx(PLAN_TIMEOUT_S)


async def test_the_wait_of_a_plan_for_its_turn_counts(autojump_clock: MockClock) -> None:
    """The coordinator has given up after 30 s, and nobody would read the answer."""
    preflight = Hanging()
    asked = queries(preflight)
    reasons: list[int] = []

    async def ask(workload_id: str) -> None:
        reasons.append(await reason(asked, workload_id))

    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(PLANS_AT_ONCE + 4):
            nursery.start_soon(ask, "hangs")
    assert reasons == [errors_pb2.ERROR_REASON_WORKER_UNAVAILABLE] * (PLANS_AT_ONCE + 4)
    assert preflight.begun == PLANS_AT_ONCE
    assert trio.current_time() - began == pytest.approx(PLAN_TIMEOUT_S)
    assert await reason(asked, "w") == 0, "the places are free again"


def test_waiting_plans_keep_out_no_other_question() -> None:
    asked, plan = queries(Hanging()), plan_query("hangs")
    reading = ConnectResponse(read_output=ReadOutput(read_id="r"))
    with ExitStack() as places:
        for _ in range(PLANS_LIMIT):
            places.enter_context(asked.place(plan))
        for question, limit in (plan, PLANS_LIMIT), (reading, QUESTIONS_LIMIT):
            if question is reading:
                for _ in range(QUESTIONS_LIMIT - PLANS_LIMIT):
                    places.enter_context(asked.place(reading))
            with pytest.raises(OperationError, match=f"{limit} questions") as refused:
                places.enter_context(asked.place(question))
            assert refused.value.reason == errors_pb2.ERROR_REASON_INSUFFICIENT_RESOURCES
    with asked.place(plan):
        pass
