"""The members of a plan: their processes, their GPUs, and the duration of their copies."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import final

from leasehold.v1 import errors_pb2

from leasehold_worker.driver.gpu_pairs import moved
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    PARALLEL_LIMIT,
    STUCK,
    Member,
    find_members,
    state_name,
    state_since,
)
from leasehold_worker.driver.transfer_rates import Estimate, Rates
from leasehold_worker.driver.verification import Verification, sized
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import is_alive, will_end
from leasehold_worker.overlap import both
from leasehold_worker.planning.destinations import full_bytes
from leasehold_worker.planning.displacement import find_displaced, is_elsewhere
from leasehold_worker.planning.driver_checks import DriverChecks
from leasehold_worker.planning.findings import Findings
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.workload_checks import (
    is_sequential,
    require_alive,
    require_all,
    require_members,
)
from leasehold_worker.workloads.states import RUNNING, UNKNOWN
from leasehold_worker.workloads.workload import Workload


@final
class PlanMembers:
    """Finds the members of plans.

    Args:
        driver: The driver.
        inventory: The GPUs of this host.
        verification: Verification of members by NVML.
        rates: Transfer rates of the driver.
        driver_checks: Checks of the driver's conditions.
    """

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        verification: Verification,
        rates: Rates,
        driver_checks: DriverChecks,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._verification = verification
        self._rates = rates
        self._driver_checks = driver_checks

    async def find(self, findings: Findings, target: WorkloadPlan, *, needs_cuda: bool = True) -> None:
        """Finds the members of a running workload, and measures them.

        Args:
            findings: Receives refusals.
            target: The workload; the call sets its members.
            needs_cuda: Whether a workload without members is refused.
        """
        processes = target.processes
        if not await self._driver_checks.runnable(findings, processes) or findings.refusals:
            findings.skip("members", "driver calls would block or be refused")
            return
        with findings.check("members", f"those of {target.workload.name} run"):
            try:
                found, usage = await both(
                    partial(find_members, self._driver, processes), self._verification.usage
                )
                target.members = found
                if needs_cuda or found:
                    pids = {identity.pid for identity in processes}
                    listed = any(pids & gpu.processes.keys() for gpu in usage.values())
                    require_members(target.workload, found, listed=listed)
            except OperationError:
                # The driver reports a process that is about to exit as a process without CUDA.
                if await will_end(target.workload.root):
                    require_alive(target.workload)
                raise
            measured = sized(found, usage, target.home)
            target.members = await find_displaced(
                measured, target.workload.gpu_uuids, self._inventory.chips, findings
            )
            target.full_bytes = full_bytes(target)
            require_all(processes, found, usage)

    async def parked(self, plan: Plan) -> tuple[Member, ...]:
        """The living members of a suspended workload."""
        workload = plan.target.workload
        alive = tuple(member for member in workload.members if is_alive(member.identity))
        if workload.state == UNKNOWN and not plan.refused:
            with plan.findings.check("members", "found afresh"):
                return await self._found_again(workload, alive)
        if len(alive) < len(workload.members):
            plan.findings.warn("members", "some members ended while suspended: they can't be restored")
        return alive

    async def _found_again(self, workload: Workload, known: Sequence[Member]) -> tuple[Member, ...]:
        """The members of a workload in state UNKNOWN, with the states that the driver reports now."""
        found = await find_members(self._driver, await workload.find_processes())
        before = {member.identity: member for member in known}
        members: list[Member] = []
        newcomers = [member for member in found if member.identity not in before]
        measured = {member.identity: member for member in await self._verification.measured(newcomers)}
        for member in found:
            former = before.get(member.identity)
            state = state_since(former.state, member.state) if former else member.state
            members.append(replace(former or measured[member.identity], state=state))
        for member in members:
            if member.state in STUCK:
                raise OperationError(
                    errors_pb2.ERROR_REASON_MEMBER_WEDGED,
                    f"process {member.identity.pid} is {state_name(member.state)}, and no driver call leads "
                    "on from there: stop the workload",
                    {"pid": str(member.identity.pid)},
                )
        return tuple(members)

    async def are_elsewhere(self, plan: Plan) -> bool:
        """Whether processes of running workloads are on GPUs that these do not lease."""
        usage = await self._verification.usage()
        for target in plan.targets:
            processes = await target.workload.find_processes()
            if target.workload.state == RUNNING and is_elsewhere(processes, target.workload.gpu_uuids, usage):
                return True
        return False

    async def are_astray(self, plan: Plan) -> bool:
        """Whether running members are on other GPUs than their workload's new ones."""
        resident = [member for member in plan.members if member.state != CHECKPOINTED]
        if any(
            moved(plan.target.home, member.displacement) != plan.target.destination for member in resident
        ):
            return True
        return not await self._verification.listed_gpus(resident) <= set(plan.target.destination)

    async def estimate(self, plan: Plan, calls: Sequence[DriverCall]) -> Estimate | None:
        """The duration of the driver's copies. All other calls take milliseconds. None: unknown."""
        if not plan.members or plan.is_unsized:
            return None
        lanes_s: list[float] = []
        chips: dict[str, int] = {}
        for target in plan.targets:
            times_s = []
            for member in target.members:
                chip = self._inventory.chips.get(next(iter(member.device_memory_bytes), ""), "GPU")
                chips[chip] = max(chips.get(chip, 0), member.total_bytes)
                times_s.append(sum(self._rates.transfer_s(chip, call, member.total_bytes) for call in calls))
            one_by_one = await is_sequential(target.workload.spec, target.members)
            lanes_s += [sum(times_s)] if one_by_one else times_s
        duration_s = max(*lanes_s, sum(lanes_s) / PARALLEL_LIMIT)
        order = "" if len(plan.members) == 1 else f"; {len(plan.members)} members, {len(lanes_s)} at once"
        bases = [self._rates.basis(chip, calls, moved_bytes) for chip, moved_bytes in chips.items()]
        return Estimate(duration_s, "; ".join(bases) + order)
