"""Answers to plan_query: dry runs."""

import logging
from typing import final

from leasehold.v1 import errors_pb2
from leasehold.worker.v1.session_pb2 import PlanAnswer, PlanQuery

from leasehold_worker.errors import OperationError, defect
from leasehold_worker.planning.durations import Durations, Way
from leasehold_worker.planning.messages import plan_message
from leasehold_worker.planning.plan import Plan
from leasehold_worker.planning.preflight import Preflight

logger = logging.getLogger(__name__)


@final
class PlanQueries:
    """Answers plan queries, without any change."""

    def __init__(self, preflight: Preflight, durations: Durations) -> None:
        self._preflight = preflight
        self._durations = durations

    async def answer(self, query: PlanQuery) -> PlanAnswer:
        """The plan of an operation, or the error."""
        try:
            plan = await self._plan(query)
        except OperationError as error:
            return PlanAnswer(plan_id=query.plan_id, error=error.to_proto())
        except Exception:  # a question is no reason for the worker to end
            logger.exception("the plan of workload %s failed because of a defect", query.workload_id)
            return PlanAnswer(plan_id=query.plan_id, error=defect().to_proto())
        return PlanAnswer(plan_id=query.plan_id, plan=plan_message(plan))

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
                    f"no plans for {kind or 'another'}: only suspend, restore, remap and "
                    "checkpoint have them",
                    {"field": "operation"},
                )
