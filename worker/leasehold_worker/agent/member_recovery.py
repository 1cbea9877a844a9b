"""Recovery of members whose operation was interrupted by a crash of the worker."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import MemberState

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.agent.remap_recovery import RemapRecovery
from leasehold_worker.commands.intents import Intent
from leasehold_worker.commands.progress import Progress
from leasehold_worker.crash_points import crash_point
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    GONE,
    LOCKED,
    RUNNING,
    STUCK,
    UNKNOWN,
    Member,
    MemberOutcome,
    find_members,
    members_after,
    state_since,
)
from leasehold_worker.driver.verification import Occupancy, placed
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity, is_alive
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.moves.move import target_of
from leasehold_worker.moves.settlement import Settlement, where_members_are
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.workload_checks import is_sequential
from leasehold_worker.workloads.eviction import CUDA_SUSPEND
from leasehold_worker.workloads.states import AWAY, ENDED, PARKED, SLEEPING, SUSPENDED, WEDGED, state_text
from leasehold_worker.workloads.states import RUNNING as WORKLOAD_RUNNING
from leasehold_worker.workloads.states import UNKNOWN as WORKLOAD_UNKNOWN
from leasehold_worker.workloads.workload import Workload, home_of

logger = logging.getLogger(__name__)

STILL_S: Final = 0.2
"""Time between two readings of members that must agree."""

STILL_TIMEOUT_S: Final = 10.0
SETTLED: Final = frozenset({WORKLOAD_RUNNING, *PARKED, WEDGED, WORKLOAD_UNKNOWN, *ENDED})
"""States of workloads without a running operation."""

_AT_REST: Final = {SUSPENDED: {CHECKPOINTED}, WORKLOAD_RUNNING: {RUNNING}, SLEEPING: {RUNNING}}
"""States of members of workloads without a running operation."""

ON_THE_WAY: Final = frozenset({RUNNING, LOCKED, CHECKPOINTED})
"""States in which a call may have left a member."""


@final
class MemberRecovery:
    """Reads the states of members, and completes or rolls back interrupted moves."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def look_at(self, workload: Workload) -> None:
        """Updates a workload that had no running command.

        An operation may have run without one: the worker suspends and stops workloads by itself, too.
        """
        if workload.state in AWAY:
            return
        home = home_of(workload)
        was_halfway = workload.state not in SETTLED
        if not home:
            if was_halfway:
                self._parts.workloads.set_state(workload, WORKLOAD_RUNNING)
            return
        async with workload.ending:  # prevents a kill of members between two driver calls
            await self._look_at_members(workload, home, was_halfway=was_halfway)

    async def _look_at_members(self, workload: Workload, home: tuple[str, ...], *, was_halfway: bool) -> None:
        before = _standing(workload)
        held = workload.gpu_uuids or home
        destination = () if workload.parked else held
        plan = Plan(
            [target := WorkloadPlan(workload, members=workload.members, home=home, destination=destination)]
        )
        # A remap that was interrupted left it parked, and it keeps the GPUs that it ran on.
        holds = workload.gpu_uuids == home
        left_parked = workload.state == WORKLOAD_UNKNOWN and workload.parked is None and holds
        try:
            found = {workload.workload_id: await self._observe(target, ())}
            crash_point("workload-probed")
            if was_halfway:
                # Possibly restored: the journal does not say how far the operation went.
                workload.mark_restored()
                await self._bring_together(plan, found)
            elif left_parked and _all_parked(found):
                workload.mark_restored()
                await self._return(plan, found, ())
        except OperationError as refused:
            logger.error("the state of workload %s can't be read: %s", workload.name, refused.message)
            if was_halfway and _standing(workload) == before:
                self._parts.workloads.lose(workload, refused)
            return
        states = _states(found[workload.workload_id])
        wanted = _AT_REST.get(workload.state)
        if wanted is not None and states <= wanted:
            return
        if workload.state == WEDGED and states & STUCK:
            return
        if workload.state == SUSPENDED and RUNNING in states:
            workload.mark_restored()
        error = OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} has changed while the worker was down: another program "
            "suspends or restores it",
        )
        members, occupancies = await where_members_are(self._parts.verification, plan, found, done=False)
        if _standing(workload) == before:  # otherwise a new operation has begun meanwhile
            reserved = self._reserve_occupied(workload, occupancies[workload.workload_id].listed)
            self._settle(plan, found, reserved, members, occupancies, error, keep=left_parked)

    def _reserve_occupied(self, workload: Workload, occupied: set[str]) -> list[Lease]:
        """Reserves the free GPUs among those that a workload without a lease uses."""
        free = {slot.gpu_uuid for slot in self._parts.pool.slots.snapshot().slots if slot.lease is None}
        mine = [gpu_uuid for gpu_uuid in home_of(workload) if gpu_uuid in occupied & free]
        if workload.lease is not None or not mine:
            return []
        return [self._parts.pool.occupy(workload.workload_id, mine, reserved=True)]

    async def settle(
        self, intent: Intent, workloads: Sequence[Workload], kind: str
    ) -> tuple[OperationError | None, str]:
        """Settles an interrupted operation.

        If all members are suspended, they stay suspended. If some members are suspended or locked, all
        members are made to run, on the new or the old GPUs. Members that ran before a remap are made to run
        even if all are suspended. Their workload keeps its old GPUs until then. Members that were running or
        sleeping before the dump of an image are made to run too.

        Args:
            intent: The last intent of the operation.
            workloads: Its workloads, none of which has ended.
            kind: suspend, restore or remap.

        Returns:
            The error of the operation, or None, and a warning.
        """
        targets = [
            target_of(workload, target) for target, workload in zip(intent.targets, workloads, strict=True)
        ]
        plan = Plan(targets, pairs=intent.pairs, policy=intent.policy)
        restoring = intent.phase == "restore"
        by_suspend = plan.policy is None or plan.policy.process_strategy == CUDA_SUSPEND
        were_down = any(
            found.parked and not target.workload.is_asleep
            for found, target in zip(intent.targets, targets, strict=True)
        )
        back = kind == "suspend" and not by_suspend and not were_down
        ran = kind != "suspend" and not any(found.parked for found in intent.targets)
        problem: OperationError | None = None
        outcomes: dict[str, list[MemberOutcome]] = {}
        try:
            for target in targets:
                outcomes[target.workload.workload_id] = await self._observe(
                    target, intent.pairs if restoring else ()
                )
            crash_point("workload-probed")
            if ran and _all_parked(outcomes):
                await self._return(plan, outcomes, intent.pairs if restoring else ())
            else:
                await self._bring_together(plan, outcomes, back=back)
        except OperationError as error:
            problem = error
        for target in targets:
            # From the checkpoint on, the operation or its way back may have restored members.
            if intent.phase in ("checkpoint", "restore", "image"):
                target.workload.mark_restored()
            outcomes.setdefault(target.workload.workload_id, [_unknown(member) for member in target.members])
        done = problem is None and (kind != "suspend" or by_suspend)
        done = done and await self._is_done(plan, outcomes, kind)
        failure = problem or OperationError(
            errors_pb2.ERROR_REASON_INTERRUPTED, "the command was interrupted halfway"
        )
        members, occupancies = await where_members_are(self._parts.verification, plan, outcomes, done=done)
        self._settle(
            plan, outcomes, intent.reserved, members, occupancies, None if done else failure, keep=ran
        )
        if done:
            return None, "the worker restarted during the command and found it complete"
        return _interruption(kind, workloads, problem), ""

    async def _observe(self, target: WorkloadPlan, pairs: tuple[GpuPair, ...]) -> list[MemberOutcome]:
        """The current members, including new ones, with their GPUs.

        Args:
            target: The workload, with its former members.
            pairs: Pairs of an interrupted restore. Empty: there was none.

        Raises:
            OperationError: The driver can't be asked.
        """
        found = await self._standing_still(target.workload)
        usage = await self._parts.verification.usage()
        outcomes: list[MemberOutcome] = []
        for member in target.members:
            now = found.pop(member.identity, None)
            lost = UNKNOWN if is_alive(member.identity) else GONE
            state = state_since(member.state, now.state) if now else lost
            outcome = MemberOutcome(member, member.state, state)
            listed = {uuid for uuid, gpu in usage.items() if member.identity.pid in gpu.processes}
            outcome.displacement = _displacement(outcome, listed, pairs)
            outcomes.append(outcome)
        home = () if target.members else target.home
        # A suspended member has no device memory, so what it needs again is unknown.
        suspended = [member for member in found.values() if member.state == CHECKPOINTED]
        others = [member for member in found.values() if member.state != CHECKPOINTED]
        newcomers = [*suspended, *await self._parts.verification.measured(others, home)]
        return outcomes + [MemberOutcome.of(member) for member in newcomers]

    async def _standing_still(self, workload: Workload) -> dict[ProcessIdentity, Member]:
        """The members, once two readings agree: a call of the former worker may still be running."""
        deadline = trio.current_time() + STILL_TIMEOUT_S
        before: dict[ProcessIdentity, Member] | None = None
        while True:
            members = await find_members(self._parts.driver, await workload.find_processes())
            found = {member.identity: member for member in members}
            if found == before or trio.current_time() > deadline:
                return found
            before = found
            await trio.sleep(STILL_S)

    async def _bring_together(
        self, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], *, back: bool = False
    ) -> None:
        """Makes members with different states, or locked ones, run where the others are.

        Args:
            plan: Their workloads.
            outcomes: Current states of the members.
            back: Include members that are all suspended.

        Raises:
            OperationError: A driver call failed.
        """
        everyone = [outcome for mine in outcomes.values() for outcome in mine]
        states = _states(everyone)
        if (
            not states <= ON_THE_WAY
            or states in (set(), {RUNNING})
            or (states == {CHECKPOINTED} and not back)
        ):
            return
        resident = [outcome for outcome in everyone if outcome.state_after in (RUNNING, LOCKED)]
        moved = [outcome for outcome in resident if outcome.displacement == plan.pairs]
        if plan.pairs and moved and len(moved) < len(resident):
            raise OperationError(
                errors_pb2.ERROR_REASON_MEMBER_WEDGED,
                "members of the workload are on its old and on its new GPUs: restore it",
            )
        group = await self._group(plan, outcomes)
        try:
            await group.restore(plan.pairs if moved else ())
        finally:
            _take_over(outcomes, group)

    async def _return(
        self, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], pairs: tuple[GpuPair, ...]
    ) -> None:
        """Restores members that are all suspended and ran before, on their new or their old GPUs.

        Raises:
            OperationError: A driver call failed.
        """
        group = await self._group(plan, outcomes)
        try:
            await RemapRecovery(self._parts.verification, group).restore(pairs)
        finally:
            _take_over(outcomes, group)

    async def _group(self, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]]) -> Group:
        """The living members as a group."""
        lanes: list[list[Member]] = []
        for target in plan.targets:
            here = [_as_it_is(o) for o in outcomes[target.workload.workload_id] if o.state_after != GONE]
            one_by_one = await is_sequential(target.workload.spec, here)
            lanes += [here] if one_by_one else [[member] for member in here]
        return Group(self._parts.driver, self._parts.inventory, self._parts.rates, lanes, lambda _: None)

    async def _is_done(self, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], kind: str) -> bool:
        """Whether every workload has reached the goal of the operation."""
        for target in plan.targets:
            mine = outcomes[target.workload.workload_id]
            states = _states(mine)
            if kind == "suspend":
                occupancy = await self._parts.verification.occupancy(members_after(mine))
                unproven = occupancy.unread.intersection(target.workload.gpu_uuids)
                if states != {CHECKPOINTED} or occupancy.listed or unproven:
                    return False
            elif states != {RUNNING} or not all(_is_at(outcome, plan.pairs) for outcome in mine):
                return False
        return True

    def _settle(
        self,
        plan: Plan,
        outcomes: Mapping[str, Sequence[MemberOutcome]],
        reserved: Sequence[Lease],
        members: Mapping[str, tuple[Member, ...]],
        occupancies: Mapping[str, Occupancy],
        error: OperationError | None,
        *,
        keep: bool = False,
    ) -> None:
        """Gives every workload the lease and the state of its members: one record on disk.

        ``keep`` leaves workloads that stay suspended the GPUs that they hold.
        """
        pool = self._parts.pool
        settlement = Settlement(self._parts.workloads, pool, plan, outcomes, reserved)
        settlement.settle(members, occupancies, error, Progress.unheard(), keep=keep)
        for lease in reserved:
            pool.release(lease)  # a lease that the settlement took over stays


def _standing(workload: Workload) -> tuple[object, ...]:
    """The parts of a workload that an operation changes. Its generation also counts application changes."""
    return workload.state, workload.lease, workload.parked, workload.members


def _states(outcomes: Sequence[MemberOutcome]) -> set[MemberState.ValueType]:
    return {outcome.state_after for outcome in outcomes} - {GONE}


def _all_parked(outcomes: Mapping[str, Sequence[MemberOutcome]]) -> bool:
    return _states([outcome for mine in outcomes.values() for outcome in mine]) == {CHECKPOINTED}


def _take_over(outcomes: Mapping[str, Sequence[MemberOutcome]], group: Group) -> None:
    """Records the states in which a group has left the members."""
    by_identity = {outcome.member.identity: outcome for mine in outcomes.values() for outcome in mine}
    for after in group.outcomes:
        outcome = by_identity[after.member.identity]
        outcome.state_after, outcome.displacement = after.state_after, after.displacement


def _as_it_is(outcome: MemberOutcome) -> Member:
    return replace(outcome.member, state=outcome.state_after, displacement=outcome.displacement)


def _unknown(member: Member) -> MemberOutcome:
    return MemberOutcome(member, member.state, UNKNOWN if is_alive(member.identity) else GONE)


def _displacement(
    outcome: MemberOutcome, listed: set[str], pairs: tuple[GpuPair, ...]
) -> tuple[GpuPair, ...]:
    """The GPUs of a member's content: as NVML lists them, or else as the restore intended."""
    member = outcome.member
    if not pairs or outcome.state_after not in (RUNNING, LOCKED):
        return member.displacement
    if listed and listed == placed(member, member.displacement) != placed(member, pairs):
        return member.displacement
    return pairs


def _is_at(outcome: MemberOutcome, pairs: tuple[GpuPair, ...]) -> bool:
    return placed(outcome.member, outcome.displacement) == placed(outcome.member, pairs)


def _interruption(kind: str, workloads: Sequence[Workload], problem: OperationError | None) -> OperationError:
    found = "; ".join(_found(kind, workload) for workload in workloads)
    why = f" ({problem.message})" if problem else ""
    return OperationError(
        errors_pb2.ERROR_REASON_INTERRUPTED, f"the worker restarted during the {kind}: now {found}{why}"
    )


def _found(kind: str, workload: Workload) -> str:
    """The state of a workload, and after a remap the GPUs on which it runs."""
    is_placed = kind == "remap" and workload.state == WORKLOAD_RUNNING
    places = f" on {', '.join(workload.gpu_uuids)}" if is_placed else ""
    return f"workload {workload.name} is {state_text(workload.state)}{places}"
