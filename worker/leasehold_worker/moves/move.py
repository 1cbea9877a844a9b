"""One move: the members of some workloads, from a plan to their new places."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.members import MemberOutcome, members_after
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.moves.settlement import StoredCheckpoint
from leasehold_worker.moves.workload_hooks import OperationHooks
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.workloads.workload import Workload


@dataclass(slots=True)
class Move:
    """One move.

    Attributes:
        plan: The plan.
        state: The state of its workloads during the move.
        reserved: GPUs that were reserved for it.
        hooks: The hooks of its workloads.
        progress: Receives the outcomes.
        group: The members of all workloads.
        outcomes: The same members, by workload id.
        kept: Checkpoint of the suspended processes. None: they are in memory.
    """

    plan: Plan
    state: WorkloadState.ValueType
    reserved: Sequence[Lease]
    hooks: OperationHooks
    progress: Progress
    group: Group
    outcomes: Mapping[str, Sequence[MemberOutcome]] = field(default_factory=dict)
    kept: StoredCheckpoint | None = None

    async def intend(self, phase: str) -> None:
        """Records the next phase on disk.

        Raises:
            OperationError: STORAGE_UNAVAILABLE; the phase must not begin.
        """
        await self.progress.intend(intent_of(phase, self.plan, self.outcomes, self.reserved))


def target_of(workload: Workload, intent: WorkloadIntent) -> WorkloadPlan:
    """The part of a plan that an intent keeps of a workload."""
    return WorkloadPlan(
        workload,
        members=intent.members,
        home=intent.home,
        destination=intent.destination,
        full_bytes=intent.full_bytes,
    )


def intent_of(
    phase: str, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], reserved: Sequence[Lease]
) -> Intent:
    """The intent of the next phase, with the current members."""
    targets = tuple(
        WorkloadIntent(
            workload_id=target.workload.workload_id,
            members=members_after(outcomes[target.workload.workload_id]) if outcomes else target.members,
            home=target.home,
            destination=target.destination,
            parked=target.workload.parked is not None,
            full_bytes=dict(target.full_bytes),
        )
        for target in plan.targets
    )
    return Intent(phase, targets, plan.pairs, tuple(reserved), plan.policy)
