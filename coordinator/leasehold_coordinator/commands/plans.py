"""Plans of operations: the worker's plan, merged with the coordinator's own refusals."""

from collections.abc import Callable
from functools import partial
from typing import Final, final

from google.protobuf import duration_pb2
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.plan_pb2 import Plan
from leasehold.worker.v1.session_pb2 import PlanQuery

from leasehold_coordinator.commands.checkpoint_list import require_own_checkpoints
from leasehold_coordinator.commands.dispatcher import Dispatcher
from leasehold_coordinator.commands.targets import Target, find_target
from leasehold_coordinator.core.field_rules import check_duration
from leasehold_coordinator.core.operation_rules import (
    check_generation,
    check_one_worker,
    check_size,
    check_state,
)
from leasehold_coordinator.core.workload_states import ENDED
from leasehold_coordinator.errors import FleetError, invalid
from leasehold_coordinator.fleet.fleet_reader import FleetReader

ANSWER_S: Final = 30.0
"""How long a worker may take to examine the processes of a workload."""

NEW_WORKLOADS_MINOR: Final = 5
"""Minor version of the protocol from which on a worker checks runs and adoptions beforehand."""

PLANNED: Final = ("suspend", "restore", "remap", "checkpoint")
"""The operations that have a plan."""

UNSEEN: Final = ENDED | {workload_pb2.WORKLOAD_STATE_PENDING}
"""States of workloads that the worker no longer has, or does not have yet."""


@final
class Plans:
    """Asks workers for plans. A plan changes nothing, so a cancelled request needs no cleanup."""

    def __init__(self, fleet: FleetReader, dispatcher: Dispatcher) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher

    async def plan(self, workload: str, operation: Operation, expected_generation: int | None) -> Plan:
        """The plan of a suspend, a restore, a remap or a checkpoint, with every refusal.

        The coordinator's refusals come first, in the order in which an operation would meet them. The worker
        checks the states of workloads and processes, unless a workload has ended or is still pending.

        Raises:
            FleetError: INVALID_ARGUMENT, UNKNOWN_WORKLOAD or WORKER_UNAVAILABLE, or the worker's own error.
        """
        if operation.WhichOneof("kind") not in PLANNED:
            raise invalid(
                "operation",
                f"{operation.WhichOneof('kind') or 'no operation'} has no plan: "
                f"ask for the plan of a {', '.join(PLANNED[:-1])} or {PLANNED[-1]}",
            )
        if operation.HasField("remap") and workload:
            raise invalid("workload", "the moves of a remap name its workloads: leave workload empty")
        if operation.restore.preempt:
            raise invalid("operation.preempt", "a preempt has no plan: ask for the plan of each suspend")
        target = await find_target(self._fleet, workload, operation)
        await require_own_checkpoints(self._fleet, target.first.worker_id, [operation.restore.checkpoint_id])
        refusals = self._refusals(target, expected_generation)
        if _is_out_of_sight(target):
            return Plan(refusals=[refusal.to_proto() for refusal in refusals])
        plan = await self._ask(target)
        ours = [refusal.to_proto() for refusal in refusals]
        reasons = {refusal.reason for refusal in ours}
        theirs = [refusal for refusal in plan.refusals if refusal.reason not in reasons]
        del plan.refusals[:]
        plan.refusals.extend([*ours, *theirs])
        return plan

    async def validate(
        self,
        *,
        workload: str,
        operation: Operation,
        expected_generation: int | None,
        timeout: duration_pb2.Duration | None,
    ) -> None:
        """Raises the first refusal of the plan, if any.

        Raises:
            FleetError: An error of :meth:`plan`, or the first refusal.
        """
        if timeout is not None:
            check_duration("timeout", timeout)
        plan = await self.plan(workload, operation, expected_generation)
        for refusal in plan.refusals:
            raise FleetError.from_proto(refusal)

    def _refusals(self, target: Target, expected_generation: int | None) -> list[FleetError]:
        refusals = _raised(partial(check_one_worker, target.workloads))
        refusals += self._dispatcher.refusals(target.first.worker_id, target.workload_ids)
        refusals += _raised(partial(check_generation, target.first, expected_generation))
        for workload in target.workloads:
            if workload.status.state in UNSEEN:
                refusals += _raised(partial(check_state, workload, target.operation))
        return refusals

    async def _ask(self, target: Target) -> Plan:
        query = PlanQuery(operation=target.operation)
        if not target.operation.HasField("remap"):
            query.workload_id = target.first.workload_id
        return await _ask_worker(self._fleet, target.first.worker_id, query)


async def check_on_worker(
    fleet: FleetReader, worker_id: str, operation: Operation, owner: str, *, only_the_request: bool
) -> None:
    """Has a worker check a run or an adoption before a command is created.

    A worker that is older than this question is not asked. It checks the command.

    Args:
        fleet: The fleet.
        worker_id: The worker.
        operation: The run or the adoption.
        owner: The owner of the new workload.
        only_the_request: Whether refusals that depend on the moment are ignored.

    Raises:
        FleetError: WORKER_UNAVAILABLE, or the worker's first refusal.
    """
    if fleet.contact(worker_id).hello.protocol_version.minor < NEW_WORKLOADS_MINOR:
        return
    plan = await _ask_worker(fleet, worker_id, PlanQuery(operation=operation, owner=owner))
    for refusal in plan.refusals:
        if not only_the_request or refusal.reason == errors_pb2.ERROR_REASON_INVALID_ARGUMENT:
            raise FleetError.from_proto(refusal)


async def _ask_worker(fleet: FleetReader, worker_id: str, query: PlanQuery) -> Plan:
    """A worker's plan.

    Raises:
        FleetError: WORKER_UNAVAILABLE, or the worker's own error.
    """
    check_size(query.ByteSize())
    answer = await fleet.contact(worker_id).plan(query, ANSWER_S)
    if answer.HasField("error"):
        raise FleetError.from_proto(answer.error)
    if not answer.HasField("plan"):
        raise FleetError(
            errors_pb2.ERROR_REASON_PROTOCOL_VIOLATION,
            "the worker answered with neither a plan nor an error: update the worker",
        )
    return answer.plan


def _is_out_of_sight(target: Target) -> bool:
    """Whether no single worker has all of the workloads."""
    return (
        any(workload.status.state in UNSEEN for workload in target.workloads)
        or len({workload.worker_id for workload in target.workloads}) > 1
    )


def _raised(check: Callable[[], None]) -> list[FleetError]:
    try:
        check()
    except FleetError as refusal:
        return [refusal]
    return []
