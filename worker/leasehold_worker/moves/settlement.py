"""The states and GPUs of workloads after an operation, derived from the location of their members.

A GPU stays leased as long as a member may hold memory on it. So no lease offers memory that is in use, and a
workload that the driver has left halfway keeps its GPUs.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, final

from leasehold.v1.eviction_pb2 import EvictionPolicy
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.gpu_pairs import moved
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    GONE,
    LOCKED,
    RUNNING,
    STUCK,
    UNKNOWN,
    Member,
    MemberOutcome,
    bytes_by_gpu,
    members_after,
)
from leasehold_worker.driver.verification import Occupancy, Usage, Verification, sized
from leasehold_worker.errors import OperationError
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.workloads.eviction import CUDA_SUSPEND, OFFLOAD, RETAIN
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import CHECKPOINTED as WORKLOAD_CHECKPOINTED
from leasehold_worker.workloads.states import ENDED, PARKED_BY, RESTORING, SLEEPING, SUSPENDED
from leasehold_worker.workloads.states import RUNNING as WORKLOAD_RUNNING
from leasehold_worker.workloads.states import UNKNOWN as WORKLOAD_UNKNOWN
from leasehold_worker.workloads.states import WEDGED as WORKLOAD_WEDGED
from leasehold_worker.workloads.workload import Parked

logger = logging.getLogger(__name__)

PLAIN_SUSPEND: Final = EvictionPolicy(weight_strategy=RETAIN, process_strategy=CUDA_SUSPEND)


@dataclass(frozen=True, slots=True)
class StoredCheckpoint:
    """The checkpoint of a workload's processes."""

    checkpoint_id: str
    disk_bytes: int


def state_of(
    outcomes: Sequence[MemberOutcome], otherwise: WorkloadState.ValueType
) -> WorkloadState.ValueType:
    """The workload's state from those of its members; ``otherwise`` if none is left."""
    states = {outcome.state_after for outcome in outcomes} - {GONE}
    if states & STUCK:
        return WORKLOAD_WEDGED
    if not states:
        return otherwise
    if states == {RUNNING}:
        return WORKLOAD_RUNNING
    if states == {CHECKPOINTED}:
        return SUSPENDED
    return WORKLOAD_UNKNOWN


def occupied_gpus(
    target: WorkloadPlan, outcomes: Sequence[MemberOutcome], occupancy: Occupancy
) -> tuple[set[str], set[str]]:
    """The GPUs that a workload's members certainly use, and those that they may use.

    Args:
        target: The workload, with its old and new GPUs.
        outcomes: Its members.
        occupancy: The GPUs on which NVML lists them. A GPU that NVML can't read may have the memory of a
            stuck member. So may a leased GPU have that of a suspended member, since the driver's word alone
            proves nothing.
    """
    possible = {*target.home, *target.destination, *target.workload.gpu_uuids}
    certain = possible & occupancy.listed
    for outcome in outcomes:
        if outcome.state_after in (RUNNING, LOCKED):
            places = possible.intersection(moved(target.home, outcome.displacement))
            # A member on a GPU without a lease still needs the leased GPUs.
            certain |= places or set(target.workload.gpu_uuids)
    states = {outcome.state_after for outcome in outcomes}
    if UNKNOWN in states:
        return certain, possible
    unproven: set[str] = set()
    if states & STUCK:
        unproven = possible
    elif CHECKPOINTED in states:
        unproven = set(target.workload.gpu_uuids)
    return certain, certain | (unproven & occupancy.unread)


@final
class Settlement:
    """The end of one operation.

    Args:
        workloads: The registry.
        pool: The pool.
        plan: The plan of the operation.
        outcomes: Outcomes of the members, by workload id.
        reserved: Leases that were reserved for it.
    """

    def __init__(
        self,
        workloads: Workloads,
        pool: GpuPool,
        plan: Plan,
        outcomes: Mapping[str, Sequence[MemberOutcome]],
        reserved: Sequence[Lease],
    ) -> None:
        self._workloads = workloads
        self._pool = pool
        self._outcomes = outcomes
        self._reserved = reserved
        self._plan = plan

    @property
    def _targets(self) -> list[WorkloadPlan]:
        """The workloads that have not ended: the GPUs of the others are free."""
        return [target for target in self._plan.targets if target.workload.state not in ENDED]

    def settle(
        self,
        members: Mapping[str, tuple[Member, ...]],
        occupancies: Mapping[str, Occupancy],
        error: OperationError | None,
        progress: Progress,
        *,
        keep: bool = False,
        kept: StoredCheckpoint | None = None,
    ) -> None:
        """Gives every workload the lease and the state of its members. No await in here: one record on disk.

        Args:
            members: The members of each workload to record, by its id.
            occupancies: Current GPUs of the members as NVML lists them, by workload id, after a failure.
            error: Why the operation failed. None: it didn't.
            progress: Receives the GPUs that were claimed and released.
            keep: After a failure, fully suspended workloads keep their GPUs: they will run there again.
            kept: Checkpoint of the processes. None: they are in memory.
        """
        if error is None:
            self._done(progress)
        else:
            self._failed(occupancies, progress, keep=keep)
        for target in self._plan.targets:
            self._settle_state(target, members[target.workload.workload_id], error, kept)

    def _done(self, progress: Progress) -> None:
        """Gives each workload its new GPUs."""
        self._exchange(
            {target.workload.workload_id: target.destination for target in self._targets}, progress
        )

    def _failed(self, occupancies: Mapping[str, Occupancy], progress: Progress, *, keep: bool) -> None:
        """Leaves each workload the GPUs that its members may use.

        After a swap, a FAILED member may be left on a GPU to which the other workload has returned. That
        workload then keeps the GPU.
        """
        certain: dict[str, set[str]] = {}
        possible: dict[str, set[str]] = {}
        for target in self._targets:
            workload_id = target.workload.workload_id
            mine = self._outcomes[workload_id]
            certain[workload_id], possible[workload_id] = occupied_gpus(
                target, mine, occupancies[workload_id]
            )
            states = {outcome.state_after for outcome in mine} - {GONE}
            # Such a restore repairs a remap that left members CHECKPOINTED. The workload keeps its GPUs.
            kept = keep or (target.workload.state == RESTORING and target.workload.parked is None)
            if not states or (kept and states == {CHECKPOINTED}):
                certain[workload_id] = set(target.workload.gpu_uuids)
            if target.workload.is_asleep and {outcome.state_after for outcome in mine} <= {RUNNING}:
                # A sleeping workload keeps a CUDA context, but no lease.
                certain[workload_id], possible[workload_id] = set(), set()
        for stray in self._targets:
            for holder in self._targets:
                shared = certain[stray.workload.workload_id] & set(holder.home) - set(stray.home)
                if holder is not stray and shared & certain[holder.workload.workload_id]:
                    certain[stray.workload.workload_id] -= shared
                    progress.warnings.append(
                        f"workload {stray.workload.name} still has memory on "
                        f"{', '.join(sorted(shared))}, which workload {holder.workload.name} "
                        f"leases: stop workload {stray.workload.name}"
                    )
        taken = set().union(*certain.values())
        for workload_id, gpu_uuids in possible.items():
            certain[workload_id] |= gpu_uuids - taken
            taken |= gpu_uuids
        self._exchange(
            {
                target.workload.workload_id: _in_order(target, certain[target.workload.workload_id])
                for target in self._targets
            },
            progress,
        )

    def _settle_state(
        self,
        target: WorkloadPlan,
        members: tuple[Member, ...],
        error: OperationError | None,
        kept: StoredCheckpoint | None,
    ) -> None:
        """Gives a workload the state of its members, once its lease is settled."""
        workload, policy = target.workload, self._plan.policy
        outcomes = self._outcomes[workload.workload_id]
        runs = bool(target.destination) or target.wakes if error is None else workload.parked is None
        state = state_of(outcomes, WORKLOAD_RUNNING if runs else SUSPENDED)
        if state == WORKLOAD_RUNNING and workload.is_asleep and not runs:
            state = SLEEPING
        if kept is not None:
            state = WORKLOAD_CHECKPOINTED
        if state == SUSPENDED and workload.lease is not None:
            state = WORKLOAD_UNKNOWN  # the driver reports CHECKPOINTED, but NVML reports used memory
        parked = workload.parked
        if workload.lease is not None or state == WORKLOAD_RUNNING:
            parked = None
        elif parked is None or (error is None and policy is not None):
            parked = _parked(target, outcomes, policy or PLAIN_SUSPEND, kept)
        if parked is not None and state in PARKED_BY:
            parked = parked.by(PARKED_BY[state])
        home = target.home if state == WORKLOAD_UNKNOWN else ()
        self._workloads.settle(workload, state, members, parked, home=home, error=error)

    def _exchange(self, wanted: Mapping[str, Sequence[str]], progress: Progress) -> None:
        """Exchanges the leases that change, in one step."""
        before = [gpu_uuid for target in self._targets for gpu_uuid in target.workload.gpu_uuids]
        changed = [
            target
            for target in self._targets
            if tuple(wanted[target.workload.workload_id]) != target.workload.gpu_uuids
        ]
        granted = self._pool.reassign(
            [*(target.workload.lease for target in changed if target.workload.lease), *self._reserved],
            [(target.workload.workload_id, wanted[target.workload.workload_id]) for target in changed],
        )
        for target in changed:
            target.workload.hold(granted.get(target.workload.workload_id))
        after = {gpu_uuid for target in self._targets for gpu_uuid in target.workload.gpu_uuids}
        progress.released_gpu_uuids = tuple(gpu_uuid for gpu_uuid in before if gpu_uuid not in after)
        progress.claimed_gpu_uuids = tuple(
            gpu_uuid for target in changed for gpu_uuid in target.workload.gpu_uuids
        )


async def where_members_are(
    verification: Verification, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], *, done: bool
) -> tuple[dict[str, tuple[Member, ...]], dict[str, Occupancy]]:
    """The members of each workload as NVML lists them now, and after a failure also their GPUs.

    All waits are here, so that leases and states can then change in one step. Nothing fails here, since the
    members have moved: without an answer, such as for lack of threads, sizes or GPUs are unknown.
    """
    members = {workload_id: members_after(mine) for workload_id, mine in outcomes.items()}
    if not done:
        return members, {id_: await verification.occupancy(mine) for id_, mine in members.items()}
    awake = [target for target in plan.targets if target.destination]
    usage: Usage = {}
    try:
        usage = await verification.usage() if awake else {}
    except (OSError, RuntimeError) as error:  # the places are proven, and the next plan measures again
        logger.warning("NVML can't be asked for the sizes of processes: %s", error)
    for target in awake:
        mine = members[target.workload.workload_id]
        at_home = [replace(member, displacement=()) for member in mine]
        members[target.workload.workload_id] = sized(at_home, usage, target.destination)
    return members, {}


def _parked(
    target: WorkloadPlan,
    outcomes: Sequence[MemberOutcome],
    policy: EvictionPolicy,
    kept: StoredCheckpoint | None,
) -> Parked:
    """The record that a restore needs, whichever strategy suspended the workload before."""
    before = target.workload.parked
    taken_down = bytes_by_gpu(outcome.member for outcome in outcomes)
    full = {**taken_down, **target.full_bytes}
    in_host = sum(taken_down.values())
    if policy.weight_strategy == OFFLOAD:
        in_host = max(in_host, sum(full.values()))
    return Parked(
        gpu_uuids=target.home,
        device_memory_bytes=full,
        policy=policy,
        since=before.since if before else datetime.now(UTC),
        host_bytes=0 if kept else in_host,
        checkpoint_id=kept.checkpoint_id if kept else "",
        disk_bytes=kept.disk_bytes if kept else 0,
    )


def _in_order(target: WorkloadPlan, gpu_uuids: set[str]) -> tuple[str, ...]:
    """The GPUs in the order of the lease if they are the same, else in the order of the old and new GPUs."""
    if gpu_uuids == set(target.workload.gpu_uuids):
        return target.workload.gpu_uuids
    known = dict.fromkeys((*target.home, *target.destination, *target.workload.gpu_uuids))
    return tuple(uuid for uuid in known if uuid in gpu_uuids)
