"""The checks before a suspend, a restore and a remap, for a dry run and for the operation itself."""

from collections.abc import Collection
from functools import partial
from typing import Final, final

from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.eviction_pb2 import EvictionPolicy, ProcessStrategy

from leasehold_worker.byte_sizes import size_text
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import (
    are_unlisted,
)
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import invalid
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.hooks.context import calls, concerns
from leasehold_worker.host.processes import is_alive
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.leasing.suspend_memory import SuspendMemory
from leasehold_worker.overlap import both
from leasehold_worker.planning.destinations import Destinations, full_bytes, stay_at_home
from leasehold_worker.planning.displacement import warnings_of_children
from leasehold_worker.planning.driver_checks import REMAP_CUDA_VERSION, SUSPEND_CUDA_VERSION, DriverChecks
from leasehold_worker.planning.plan import Plan, WorkloadPlan
from leasehold_worker.planning.plan_members import PlanMembers
from leasehold_worker.planning.policy_checks import PolicyChecks
from leasehold_worker.planning.tiers import Tiers
from leasehold_worker.planning.workload_checks import (
    lock_timeout_s,
    parse_pairs,
    require_ready,
    require_state,
    require_stopped,
)
from leasehold_worker.workloads import eviction
from leasehold_worker.workloads.eviction import (
    DISCARD,
    OFFLOAD,
    Step,
    escalated,
    hook_steps,
    is_weaker,
    ladder,
    policy_text,
    resolve,
    strategy_of,
)
from leasehold_worker.workloads.foreign_processes import ForeignWatch
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import CHECKPOINTED as WORKLOAD_CHECKPOINTED
from leasehold_worker.workloads.states import (
    PARKED,
    RUNNING,
    SLEEPING,
    STOPPED,
    SUSPENDED,
    UNKNOWN,
    state_text,
)
from leasehold_worker.workloads.workload import Workload, home_of

_DOWNWARD: Final = {"suspended": (RUNNING, SLEEPING), "checkpointed": (RUNNING, SLEEPING, SUSPENDED)}
"""The states from which a workload can be suspended, by operation."""


@final
class Preflight:
    """Makes the plans of one worker."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        foreign: ForeignWatch,
        host_memory: SuspendMemory,
        rates: Rates,
        verification: Verification,
        policies: PolicyChecks,
        tiers: Tiers,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._workloads = workloads
        self._foreign = foreign
        self._host_memory = host_memory
        self._policies = policies
        self._tiers = tiers
        self._driver_checks = DriverChecks(driver, inventory)
        self._members = PlanMembers(driver, inventory, verification, rates, self._driver_checks)
        self._destinations = Destinations(inventory, pool, self._driver_checks)

    async def suspend(
        self,
        workload_id: str,
        operation: operation_pb2.SuspendOperation,
        tried: Collection[ProcessStrategy.ValueType] = (),
    ) -> Plan:
        """The plan of a suspend, by the first policy of the escalation order that is not refused.

        Args:
            workload_id: The workload.
            operation: The policy and its options.
            tried: Process strategies that have failed already.

        Raises:
            OperationError: UNKNOWN_WORKLOAD, or INVALID_ARGUMENT.
        """
        workload = self._workloads.get(workload_id)
        drain_s = lock_timeout_s(operation)
        asked = operation.policy if operation.HasField("policy") else None
        rungs = ladder(resolve(asked, workload.spec.eviction))
        named = None if asked is None else rungs[0]
        first: Plan | None = None
        skipped: list[str] = []
        for rung in rungs:
            if rung.process_strategy in tried:
                continue
            allowed = operation.force or rung is not rungs[0]
            plan = await self._suspend_by(workload, rung, named, allowed=allowed, forced=operation.force)
            plan.lock_timeout_s = drain_s
            self._tiers.excuse(plan)
            if not plan.refused:
                plan.findings.warnings += skipped
                return plan
            if not operation.gives_way and _is_unready(plan):
                return plan  # do not escalate: the program will soon be ready
            skipped.append(f"{policy_text(rung)} was not possible: {plan.findings.refusals[0].message}")
            first = first or plan
        if first is None:
            raise ValueError("every rung was tried")
        return first

    async def _suspend_by(
        self,
        workload: Workload,
        policy: EvictionPolicy,
        named: EvictionPolicy | None,
        *,
        allowed: bool,
        forced: bool,
    ) -> Plan:
        """The plan of a suspend by one policy.

        Args:
            workload: The workload.
            policy: The policy.
            named: The policy that the request names. None: it names none.
            allowed: Whether the policy may lose work, or free nothing.
            forced: Whether its readiness probes are ignored.
        """
        plan = Plan([WorkloadPlan(workload, home=home_of(workload))], asked_policy=named)
        if workload.parked is not None and workload.state in PARKED:
            if not is_weaker(workload.parked.policy.process_strategy, policy.process_strategy):
                plan.already_there, plan.policy = True, workload.parked.policy
                return plan
            policy = escalated(workload.parked.policy, policy)
        elif workload.hooked is not None:  # an earlier suspend was not rolled back completely
            policy = escalated(workload.hooked.policy, policy)
        plan.policy = policy
        plan.steps = [step.down for step in _steps(plan.target, policy)]
        self._policies.check(plan, allowed=allowed)
        if policy.process_strategy != eviction.STOP and not forced:
            _check_ready(plan)
        match policy.process_strategy:
            case eviction.KEEP_RUNNING:
                await self._look_at_sleeper(plan)
            case eviction.CUDA_SUSPEND:
                await self._look_at_running(plan, SUSPEND_CUDA_VERSION, "suspended")
            case eviction.CHECKPOINT:
                if workload.state == SUSPENDED:
                    await self._look_at_suspended(plan)
                else:
                    await self._look_at_running(plan, SUSPEND_CUDA_VERSION, "checkpointed")
                if not plan.refused:
                    await self._policies.look_at_image(plan)
            case eviction.STOP:
                with plan.findings.check("state", f"{workload.name} has not ended"):
                    require_state(workload, (RUNNING, *PARKED), "stopped")
                await self._policies.look_at_application(plan)
        if policy.process_strategy in (eviction.CUDA_SUSPEND, eviction.CHECKPOINT):
            plan.estimate = await self._members.estimate(plan, [DriverCall.CHECKPOINT])
        self._policies.tell_tiers(plan)
        return plan

    async def _look_at_suspended(self, plan: Plan) -> None:
        """Checks the needs of writing suspended processes to disk."""
        target = plan.target
        target.processes = await target.workload.find_processes()
        target.full_bytes = target.workload.parked.device_memory_bytes if target.workload.parked else {}
        await self._driver_checks.runnable(plan.findings, target.processes)
        target.members = await self._members.parked(plan)

    async def _look_at_sleeper(self, plan: Plan) -> None:
        """Checks the needs of freeing weights while the processes keep running."""
        target = plan.target
        with plan.findings.check("state", f"{target.workload.name} is running on GPUs"):
            require_state(target.workload, (RUNNING,), "put to sleep")
            if target.workload.lease is None:
                raise invalid(
                    "policy",
                    f"workload {target.workload.name} holds no GPU, so there is nothing to free: choose "
                    "checkpoint or stop",
                )
        await _list_processes(plan)
        await self._members.find(plan.findings, target)
        if plan.policy is not None and plan.policy.weight_strategy == OFFLOAD and not plan.refused:
            self._look_at_host_memory(plan)

    async def restore(
        self,
        workload_id: str,
        operation: operation_pb2.RestoreOperation,
        *,
        held: Collection[str] = (),
    ) -> Plan:
        """The plan of a restore. Members of an UNKNOWN workload are restored from wherever they are.

        Args:
            workload_id: The workload.
            operation: The GPUs of the restore.
            held: GPUs that were claimed for it.

        Raises:
            OperationError: UNKNOWN_WORKLOAD, or INVALID_ARGUMENT.
        """
        workload = self._workloads.get(workload_id)
        moves = bool(operation.gpu_uuids or operation.pairs)
        plan = Plan(
            [WorkloadPlan(workload, home=home_of(workload))],
            named_gpu_uuids=operation.gpu_uuids,
            named_checkpoint_id=operation.checkpoint_id,
            hold_id=operation.hold_id,
        )
        if workload.state == RUNNING and not moves and not operation.checkpoint_id:
            plan.already_there = workload.hooked is None
            plan.target.destination = plan.target.home
            if workload.hooked is not None:
                plan.policy = workload.hooked.policy
                plan.steps = [step.up for step in reversed(hook_steps(plan.policy))]
            return plan
        findings = plan.findings
        with findings.check("state", f"{workload.name} is {state_text(workload.state)}"):
            if operation.checkpoint_id:
                require_stopped(workload)
            require_state(workload, PARKED if moves else PARKED | {UNKNOWN}, "restored")
        if workload.parked is not None:
            plan.policy = workload.parked.policy
            plan.steps = [step.up for step in reversed(_steps(plan.target, plan.policy))]
        if plan.refused:
            return plan
        await self._foreign.look(self._workloads)
        if workload.state == STOPPED:
            await self._policies.look_at_start(plan, operation)
            return plan
        processes = [member.identity for member in workload.members if is_alive(member.identity)]
        if workload.state == UNKNOWN:
            processes = await workload.find_processes()
        if workload.state == WORKLOAD_CHECKPOINTED:
            plan.target.members = workload.members
            await self._policies.look_at_kept_image(plan)
        elif await self._driver_checks.runnable(findings, processes):
            plan.target.members = await self._members.parked(plan)
        plan.target.full_bytes = full_bytes(plan.target)
        if workload.is_asleep:
            stay_at_home(plan, operation)
        else:
            await self._destinations.choose(plan, operation)
            plan.astray = (
                workload.state == UNKNOWN and not plan.refused and await self._members.are_astray(plan)
            )
        if not workload.is_asleep:
            self._driver_checks.driver(findings, REMAP_CUDA_VERSION if plan.pairs else SUSPEND_CUDA_VERSION)
        if not plan.refused and workload.state in (SUSPENDED, UNKNOWN):
            await self._driver_checks.members(findings, plan.members)
        if len(plan.target.destination) == len(plan.target.home):
            await self._destinations.check(plan, held)
        if plan.astray:
            self._look_at_host_memory(plan)
        calls = [DriverCall.CHECKPOINT, DriverCall.RESTORE] if plan.astray else [DriverCall.RESTORE]
        plan.estimate = None if workload.is_asleep else await self._members.estimate(plan, calls)
        plan.move_warnings = await warnings_of_children(plan)
        self._policies.tell_tiers(plan)
        return plan

    async def checkpoint(self, workload_id: str) -> Plan:
        """The plan of an application's checkpoint.

        Raises:
            OperationError: UNKNOWN_WORKLOAD.
        """
        workload = self._workloads.get(workload_id)
        home = home_of(workload)
        plan = Plan([WorkloadPlan(workload, home=home, destination=home)])
        with plan.findings.check("state", f"{workload.name} is running"):
            require_state(workload, (RUNNING,), "checkpointed")
        await self._policies.look_at_kernel(plan)
        plan.steps = [eviction.Step.SAVE.down, "the application continues"]
        return plan

    async def remap(self, operation: operation_pb2.RemapOperation) -> Plan:
        """The plan of a remap, of one workload or of several that move together.

        Raises:
            OperationError: UNKNOWN_WORKLOAD, or INVALID_ARGUMENT.
        """
        drain_s = lock_timeout_s(operation)
        if not operation.moves:
            raise invalid("moves", "a remap needs a workload and its pairs: give one move at least")
        plan = Plan(lock_timeout_s=drain_s)
        wanted: list[GpuPair] = []
        for move in operation.moves:
            workload = self._workloads.get(move.workload_id)
            if any(target.workload is workload for target in plan.targets):
                raise invalid("moves", f"workload {workload.name} is named twice: give all its pairs at once")
            plan.targets.append(WorkloadPlan(workload, home=home_of(workload)))
            with (
                plan.findings.about(workload),
                plan.findings.check("pairs", f"for GPUs that {workload.name} holds"),
            ):
                if workload.state == RUNNING and workload.lease is None:
                    raise invalid(
                        "pairs",
                        f"workload {workload.name} holds no GPU, so there is nothing to move: leave it out",
                    )
                wanted += parse_pairs(move.pairs, plan.targets[-1].home)
        with plan.findings.check("chips", "the same on both sides"):
            self._destinations.complete(plan, wanted)
        if plan.refused:
            return plan
        stays = all(
            target.workload.state == RUNNING and target.home == target.destination for target in plan.targets
        )
        if stays and not await self._members.are_elsewhere(plan):
            plan.already_there = True
            return plan
        _check_ready(plan)
        await both(
            partial(self._look_at_running, plan, REMAP_CUDA_VERSION, "remapped"),
            partial(self._foreign.look, self._workloads),
        )
        await self._destinations.check(plan)
        plan.estimate = await self._members.estimate(plan, [DriverCall.CHECKPOINT, DriverCall.RESTORE])
        plan.move_warnings = await warnings_of_children(plan)
        return plan

    async def _look_at_running(self, plan: Plan, cuda_version: int, verb: str) -> None:
        """Checks the needs of a suspend: members that can be locked and checkpointed, and host memory."""
        findings = plan.findings
        for target in plan.targets:
            with (
                findings.about(target.workload),
                findings.check("state", f"{target.workload.name} is {state_text(target.workload.state)}"),
            ):
                require_state(target.workload, _DOWNWARD.get(verb, (RUNNING,)), verb)
            target.home = target.home or home_of(target.workload)
        self._driver_checks.driver(findings, cuda_version)
        await both(partial(self._look_at_gpus, plan), partial(_list_processes, plan))
        for target in plan.targets:
            # CRIU can dump a program without CUDA too. The driver then has no members to suspend.
            held = target.workload.lease is not None or target.workload.is_asleep
            with findings.about(target.workload):
                await self._members.find(findings, target, needs_cuda=held or verb != "checkpointed")
        if plan.refused:
            return
        await self._driver_checks.members(findings, plan.members)
        self._look_at_host_memory(plan)
        for target in plan.targets:
            if are_unlisted(target.members):
                with findings.about(target.workload):
                    findings.warn(
                        "device_memory_known",
                        f"NVML lists no member of workload {target.workload.name} on a GPU: "
                        "all memory in use on its GPUs counts as its own, and the location "
                        "of its members is not verified",
                    )

    async def _look_at_gpus(self, plan: Plan) -> None:
        findings = plan.findings
        await self._driver_checks.mig(
            findings, [gpu_uuid for target in plan.targets for gpu_uuid in target.home]
        )
        leases = [target.workload.lease for target in plan.targets if target.workload.lease is not None]
        await self._driver_checks.present(
            findings, [gpu_uuid for lease in leases for gpu_uuid in lease.gpu_uuids]
        )

    def _look_at_host_memory(self, plan: Plan) -> None:
        need = self._host_memory.need(plan.bytes_by_pid, parks=plan.stays_in_memory)
        plan.host_memory = need
        if plan.policy is not None and plan.policy.weight_strategy == DISCARD:
            plan.findings.skip("host_memory", "checked once the weights are gone")
            return
        with plan.findings.check("host_memory", f"{size_text(need.needed_bytes)} needed"):
            plan.require_sizes()
            need.check()


def _steps(target: WorkloadPlan, policy: EvictionPolicy) -> list[Step]:
    """The steps of a policy, without that of hooks if no hook of the workload is called."""
    hooks = calls(target.workload.spec.hooks)
    is_hooked = any(concerns(hook, policy.weight_strategy) for hook in hooks)
    return [step for step in strategy_of(policy).steps if is_hooked or step is not Step.HOOKS]


async def _list_processes(plan: Plan) -> None:
    for target in plan.targets:
        target.tree = await target.workload.find_tree()
        target.processes = target.tree.processes


def _check_ready(plan: Plan) -> None:
    for target in plan.targets:
        if target.workload.has_probe:
            with (
                plan.findings.about(target.workload),
                plan.findings.check("ready", f"{target.workload.name} is ready"),
            ):
                require_ready(target.workload, plan.asked_policy)


def _is_unready(plan: Plan) -> bool:
    return any(refusal.reason == errors_pb2.ERROR_REASON_NOT_READY for refusal in plan.findings.refusals)
