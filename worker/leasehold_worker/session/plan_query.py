"""Answers to plan_query: dry runs."""

import logging
from collections.abc import Awaitable, Callable
from typing import final

from leasehold.v1 import errors_pb2, plan_pb2
from leasehold.v1.operation_pb2 import AdoptOperation, RunOperation
from leasehold.worker.v1.session_pb2 import PlanAnswer, PlanQuery

from leasehold_worker.errors import OperationError, defect
from leasehold_worker.planning.durations import Durations, Way
from leasehold_worker.planning.messages import plan_message
from leasehold_worker.planning.plan import Plan
from leasehold_worker.planning.preflight import Preflight

logger = logging.getLogger(__name__)


@final
class PlanQueries:
    """Answers plan queries, without any change.

    Args:
        preflight: Makes the plans.
        durations: Estimates their durations.
        check_run: Refuses what a run for an owner would refuse now.
        check_adoption: Refuses what an adoption for an owner would refuse now.
    """

    def __init__(
        self,
        preflight: Preflight,
        durations: Durations,
        check_run: Callable[[RunOperation, str], Awaitable[None]],
        check_adoption: Callable[[AdoptOperation, str], Awaitable[None]],
    ) -> None:
        self._preflight = preflight
        self._check_run = check_run
        self._check_adoption = check_adoption
        self._durations = durations

    async def answer(self, query: PlanQuery) -> PlanAnswer:
        """The plan of an operation, or the error."""
        try:
            if query.operation.HasField("run") or query.operation.HasField("adopt"):
                return await self._check(query)
            plan = await self._plan(query)
        except OperationError as error:
            return PlanAnswer(plan_id=query.plan_id, error=error.to_proto())
        except Exception:  # a failed query must not end the worker
            logger.exception("the plan of workload %s failed because of a defect", query.workload_id)
            return PlanAnswer(plan_id=query.plan_id, error=defect().to_proto())
        return PlanAnswer(plan_id=query.plan_id, plan=plan_message(plan))

    async def _check(self, query: PlanQuery) -> PlanAnswer:
        """The answer for a new workload: a plan that is empty except for the first refusal, if any."""
        operation = query.operation
        answer = PlanAnswer(plan_id=query.plan_id, plan=plan_pb2.Plan())
        try:
            if operation.HasField("run"):
                await self._check_run(operation.run, query.owner)
            else:
                await self._check_adoption(operation.adopt, query.owner)
        except OperationError as error:
            answer.plan.refusals.append(error.to_proto())
        return answer

    async def _plan(self, query: PlanQuery) -> Plan:
        operation = query.operation
        match operation.WhichOneof("kind"):
            case "suspend":
                plan = await self._preflight.suspend(query.workload_id, operation.suspend)
                self._durations.complete(plan, Way.DOWN)
                return plan
            case "restore":
                plan = await self._preflight.restore(query.workload_id, operation.restore)
                self._durations.complete(plan, Way.UP)
                return plan
            case "remap":
                return await self._preflight.remap(operation.remap)
            case "checkpoint":
                plan = await self._preflight.checkpoint(query.workload_id)
                self._durations.complete_save(plan)
                return plan
            case kind:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                    f"no plans for {kind or 'another'}: only suspend, restore, remap, checkpoint, run and "
                    "adopt have them",
                    {"field": "operation"},
                )
