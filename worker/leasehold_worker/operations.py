"""What a command does to a workload: run, suspend, restore, remap.

Suspending releases the lease, restoring claims again, and the map follows from where it lands. Each operation
begins with its plan. Destination GPUs are reserved before anything is given up, and a lease changes hands
only after the proof. A cancellation undoes an operation; past its point of no return, which is the first call
that moves device memory, it is finished.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import Final, final

import trio
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.checkpoint.driver import Driver
from leasehold_worker.checkpoint.gpu_pairs import GpuPair, complete_pairs
from leasehold_worker.checkpoint.group import Group
from leasehold_worker.checkpoint.helper_protocol import DriverCall
from leasehold_worker.checkpoint.members import Member, MemberOutcome, find_members, members_after
from leasehold_worker.checkpoint.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.checkpoint.rates import Rates
from leasehold_worker.errors import OperationError
from leasehold_worker.host_memory import HostMemory
from leasehold_worker.intents import Intent, PartyIntent
from leasehold_worker.inventory import Inventory
from leasehold_worker.leases import Lease
from leasehold_worker.plan import Plan
from leasehold_worker.pool import GpuPool
from leasehold_worker.preconditions import invalid, is_sequential, require_alive, require_known_features
from leasehold_worker.preflight import Preflight, lock_timeout_s
from leasehold_worker.proof import Before, Proof, placed
from leasehold_worker.report import Report
from leasehold_worker.settling import Settlement, settle_state, where_members_are
from leasehold_worker.taking import Taking
from leasehold_worker.workloads import Workloads, parked_bytes

SUSPENDING: Final = workload_pb2.WORKLOAD_STATE_SUSPENDING
RESTORING: Final = workload_pb2.WORKLOAD_STATE_RESTORING
REMAPPING: Final = workload_pb2.WORKLOAD_STATE_REMAPPING

PLACEMENT_ATTEMPTS: Final = 3
"""How often GPUs are chosen for a restore, where others take them between the choice and the reservation."""

STALE_BUS_ID: Final = (
    "the PCI bus id that a moved process reads may be that of its old GPU: NCCL set up from now on may fail"
)
"""NVIDIA/cuda-checkpoint issue 48."""


@final
class Operations:
    """The operations over one worker's pool, workloads and driver."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        taking: Taking,
        nursery: trio.Nursery,
        *,
        rates: Rates,
        host_memory: HostMemory,
        proof: Proof,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._pool = pool
        self._workloads = workloads
        self._taking = taking
        self._nursery = nursery
        self._rates = rates
        self._host_memory = host_memory
        self._proof = proof
        self.preflight = Preflight(driver, inventory, pool, workloads, host_memory, rates, proof)
        """Makes the plans that suspends, restores and remaps begin with."""

    async def run(self, workload_id: str, operation: command_pb2.RunOperation, report: Report) -> None:
        """Takes what the program needs, without waiting, and starts it."""
        spec = operation.spec
        if not spec.arguments:
            raise invalid("arguments", "a workload needs a program: give its arguments")
        require_known_features(spec)
        allocation = await self._taking.for_run(workload_id, operation)
        lease = allocation.lease
        report.enter("spawn")
        try:
            party = PartyIntent(workload_id, (), (), lease.gpu_uuids if lease else (), parked=False)
            await report.intend(Intent("run", (party,), reserved=(lease,) if lease else ()))
            await self._workloads.spawn(
                workload_id, operation.name, spec, lease, allocation.host, self._nursery
            )
        except BaseException:
            allocation.release()
            raise
        allocation.hand_over_lease()
        report.claimed_gpu_uuids = lease.gpu_uuids if lease else ()

    async def suspend(
        self, workload_id: str, operation: command_pb2.SuspendOperation, report: Report
    ) -> None:
        """Locks and checkpoints the members, proves that the memory is free, and releases the lease."""
        report.enter("preflight")
        plan = await self.preflight.suspend(workload_id, operation)
        if self._is_settled(plan, report):
            return
        plan.party.workload.yielded = operation.gives_way  # kept with the states that follow
        await self._carry_out(plan, SUSPENDING, [], report, lock_timeout_s(operation))

    async def restore(
        self, workload_id: str, operation: command_pb2.RestoreOperation, report: Report
    ) -> None:
        """Reserves GPUs, restores the members there, proves it, and turns the reservation into a lease."""
        report.enter("preflight")
        lent = await self._taking.from_helpers(self._workloads.get(workload_id), operation)
        if lent is not None:
            await self._restore_on(lent, report)
            return
        for attempt in range(PLACEMENT_ATTEMPTS):
            plan = await self.preflight.restore(workload_id, operation)
            if self._is_settled(plan, report):
                return
            try:
                reserved = self._reserve(plan)
                break
            except OperationError:  # somebody else was quicker
                named = bool(operation.gpu_uuids or operation.pairs)
                if named or attempt == PLACEMENT_ATTEMPTS - 1:
                    raise
        # Members that are where they must not be are parked first, as if they were moved.
        state = REMAPPING if plan.astray else RESTORING
        await self._carry_out(plan, state, reserved, report, DEFAULT_LOCK_TIMEOUT_S)

    async def _restore_on(self, lease: Lease, report: Report) -> None:
        """Restores a workload on GPUs that were claimed for it."""
        try:
            named = command_pb2.RestoreOperation(gpu_uuids=lease.gpu_uuids)
            plan = await self.preflight.restore(lease.workload_id, named, held=lease.gpu_uuids)
            plan.require()
            report.warnings += plan.findings.warnings
        except BaseException:
            self._pool.release(lease)
            raise
        state = REMAPPING if plan.astray else RESTORING
        await self._carry_out(plan, state, [lease], report, DEFAULT_LOCK_TIMEOUT_S)

    async def remap(self, operation: command_pb2.RemapOperation, report: Report) -> None:
        """Moves running workloads: suspends them, and restores them on their new GPUs or else on the old."""
        report.enter("preflight")
        plan = await self.preflight.remap(operation)
        if self._is_settled(plan, report):
            return
        await self._carry_out(plan, REMAPPING, self._reserve(plan), report, lock_timeout_s(operation))

    def _is_settled(self, plan: Plan, report: Report) -> bool:
        """Whether there is nothing to do.

        Raises:
            OperationError: The first thing that the plan found in the way.
        """
        plan.require()
        report.warnings += plan.findings.warnings
        report.already_there = plan.already_there
        return plan.already_there

    def _reserve(self, plan: Plan) -> list[Lease]:
        """Reserves what the plan takes and nobody of it holds, all or nothing.

        Raises:
            OperationError: NO_FREE_GPU, and nothing is reserved.
        """
        reserved: list[Lease] = []
        try:
            for party in plan.parties:
                if gpu_uuids := plan.to_reserve(party):
                    reserved.append(
                        self._pool.reserve_gpus(
                            party.workload.workload_id,
                            gpu_uuids,
                            allow_foreign=party.workload.spec.resources.allow_foreign,
                        )
                    )
        except OperationError:
            for lease in reserved:
                self._pool.release(lease)
            raise
        return reserved

    async def _carry_out(
        self,
        plan: Plan,
        state: WorkloadState.ValueType,
        reserved: Sequence[Lease],
        report: Report,
        lock_timeout_s: float,
    ) -> None:
        """Does what was planned, or undoes it; states and leases follow from what came of it."""
        try:
            with self._host_memory.charged({} if state == RESTORING else plan.bytes_by_pid):
                for party in plan.parties:
                    self._workloads.set_state(party.workload, state)
                    if state != RESTORING:
                        self._workloads.limit_memory(
                            party.workload, sum(member.total_bytes for member in party.members)
                        )
                await self._move(plan, state, reserved, report, lock_timeout_s)
        finally:
            for lease in reserved:
                self._pool.release(lease)  # what was used has been exchanged, and is not released by this

    async def _move(
        self,
        plan: Plan,
        state: WorkloadState.ValueType,
        reserved: Sequence[Lease],
        report: Report,
        lock_timeout_s: float,
    ) -> None:
        """Parks the members, wakes them, or one after the other, and settles by where they are then."""
        group, outcomes = self._group(plan, report)
        settlement = Settlement(self._pool, plan, outcomes, reserved)
        error: OperationError | None = None
        done = False
        try:

            async def intend(phase: str) -> None:
                await report.intend(_intent(phase, plan, outcomes, reserved))

            if state != RESTORING:
                await self._park(plan, group, lock_timeout_s, report, intend)
            with trio.CancelScope(shield=True):
                if state == RESTORING:
                    await intend("restore")
                    _mark_restored(plan)
                    await self._wake(group, plan.pairs, report)
                elif state == REMAPPING:
                    _mark_restored(plan)
                    await self._wake_or_return(group, plan.pairs, report, intend)
            for party in plan.parties:
                require_alive(party.workload)
            done = True
        except OperationError as raised:
            error = raised
            raise
        finally:
            with trio.CancelScope(shield=True):
                await self._settle(plan, settlement, outcomes, report, error, done=done)

    async def _settle(
        self,
        plan: Plan,
        settlement: Settlement,
        outcomes: Mapping[str, Sequence[MemberOutcome]],
        report: Report,
        error: OperationError | None,
        *,
        done: bool,
    ) -> None:
        members, listed = await where_members_are(self._proof, plan, outcomes, done=done)
        if not done:
            errors = [outcome.error for mine in outcomes.values() for outcome in mine]
            error = error or next((told for told in errors if told is not None), None)
        # No await from here on: the leases and states of all parties are one record on disk.
        if done:
            settlement.done(report)
            report.applied_pairs = plan.pairs
            if plan.pairs:
                report.warnings.append(STALE_BUS_ID)
        else:
            settlement.failed(listed, report)
        for party in plan.parties:
            workload_id = party.workload.workload_id
            mine = outcomes[workload_id]
            if any(phase.call is DriverCall.RESTORE for outcome in mine for phase in outcome.phases):
                party.workload.restored = True
            settle_state(self._workloads, party, mine, members[workload_id], error)
            self._workloads.limit_memory(party.workload, parked_bytes(party.workload))

    def _group(self, plan: Plan, report: Report) -> tuple[Group, dict[str, list[MemberOutcome]]]:
        """The members of all parties as one group, and their outcomes by workload id."""
        lanes: list[Sequence[Member]] = []
        for party in plan.parties:
            one_by_one = is_sequential(party.workload.spec, party.members)
            lanes += [party.members] if one_by_one else [(member,) for member in party.members]
        group = Group(self._driver, self._inventory, self._rates, lanes, report.enter)
        left = iter(group.outcomes)
        outcomes = {
            party.workload.workload_id: list(islice(left, len(party.members))) for party in plan.parties
        }
        report.outcomes += [
            (workload_id, outcome) for workload_id, mine in outcomes.items() for outcome in mine
        ]
        return group, outcomes

    async def _park(
        self,
        plan: Plan,
        group: Group,
        lock_timeout_s: float,
        report: Report,
        intend: Callable[[str], Awaitable[None]],
    ) -> None:
        async def rescan() -> tuple[Member, ...]:
            found = [await find_members(self._driver, p.workload.processes()) for p in plan.parties]
            await intend("checkpoint")
            return tuple(member for members in found for member in members)

        await intend("lock")
        pids = {identity.pid for party in plan.parties for identity in party.processes}
        before = Before(plan.members, pids, await self._proof.usage())
        await group.suspend(lock_timeout_s, rescan)
        with trio.CancelScope(shield=True):
            report.enter("verify")
            try:
                await self._proof.prove_freed(before)
            except OperationError:
                await group.roll_back()
                raise

    async def _wake(self, group: Group, pairs: tuple[GpuPair, ...], report: Report) -> None:
        """Restores, and proves it. If members turn up on GPUs that nobody expected, it is tried once more."""
        before = [outcome.displacement for outcome in group.outcomes]
        try:
            await self._wake_once(group, pairs, report)
        except OperationError as error:
            if error.reason != errors_pb2.ERROR_REASON_REMAP_NOT_APPLIED:
                raise
            surprising = await self._find_places(group, before)
            await group.roll_back()
            if not surprising:
                raise
            await self._wake_once(group, pairs, report)

    async def _wake_once(self, group: Group, pairs: tuple[GpuPair, ...], report: Report) -> None:
        await group.restore(pairs)
        report.enter("verify")
        if not all(outcome.member.device_memory_bytes for outcome in group.outcomes):
            report.warnings.append("NVML lists no memory for some members: where they run is not proved")
        await self._proof.prove_placed(group.outcomes)

    async def _find_places(self, group: Group, before: Sequence[tuple[GpuPair, ...]]) -> bool:
        """Notes where NVML lists each member. True: one is neither where it was nor where it was sent.

        Then an earlier restore had moved it and said that it had not.
        """
        surprising = False
        for outcome, displacement in zip(group.outcomes, before, strict=True):
            actual = await self._proof.listed_gpus([outcome.member])
            if actual == placed(outcome.member, displacement):
                outcome.displacement = displacement
            elif actual != placed(outcome.member, outcome.displacement) and len(actual) == 1:
                moved = map(GpuPair, outcome.member.device_memory_bytes, actual)
                outcome.displacement = complete_pairs(moved, self._inventory.chips)
                surprising = True
        return surprising

    async def _wake_or_return(
        self,
        group: Group,
        pairs: tuple[GpuPair, ...],
        report: Report,
        intend: Callable[[str], Awaitable[None]],
    ) -> None:
        """Restores on the new GPUs, or else on the old ones, or else leaves the members parked."""
        try:
            await intend("restore")
            await self._wake(group, pairs, report)
        except OperationError:
            try:
                await self._wake(group, (), report)
            except OperationError as error:
                report.warnings.append(f"it could not go back to its old GPUs either: {error.message}")
            else:
                report.warnings.append("it could not be restored on the new GPUs, so it went back to the old")
            raise


def _intent(
    phase: str, plan: Plan, outcomes: Mapping[str, Sequence[MemberOutcome]], reserved: Sequence[Lease]
) -> Intent:
    """What the next phase is about to do, with the members as they are now."""
    parties = tuple(
        PartyIntent(
            workload_id=party.workload.workload_id,
            members=members_after(outcomes[party.workload.workload_id]),
            home=party.home,
            destination=party.destination,
            parked=party.workload.parked is not None,
        )
        for party in plan.parties
    )
    return Intent(phase, parties, plan.pairs, tuple(reserved))


def _mark_restored(plan: Plan) -> None:
    """From now on, killing the members while they run could hang the host."""
    for party in plan.parties:
        party.workload.restored = True
