"""The needs of a policy beside the driver: its place in the table, hooks, disk, CRIU, and applications."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, final

from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec

from leasehold_worker.applications.checkpointing import no_kernel
from leasehold_worker.applications.registry import ApplicationRegistry
from leasehold_worker.byte_sizes import size_text
from leasehold_worker.checkpoints.application_file import StoredCheckpoint
from leasehold_worker.checkpoints.application_store import ApplicationStore
from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.volume_calls import call_volume
from leasehold_worker.criu.image_size import image_bytes
from leasehold_worker.criu.support import CriuSupport
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.uuids import normalize_uuid
from leasehold_worker.hooks.validation import weights_hooks
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.leasing.allocation import AllocRequest, Resources
from leasehold_worker.leasing.gpu_selection import GpuRequest
from leasehold_worker.planning.plan import Destination, Plan, TierNeed
from leasehold_worker.workloads.eviction import (
    CHECKPOINT,
    DEVICE,
    DISK,
    HOST,
    KEEP_RUNNING,
    RETAIN,
    STOP,
    forced_command,
    policy_text,
    process_text,
    strategy_of,
    weights_text,
)
from leasehold_worker.workloads.states import AWAY, RUNNING, SUSPENDED
from leasehold_worker.workloads.workload import RUN, Workload

_SAYS: Final = {
    errors_pb2.ERROR_REASON_NOTHING_FREED: "frees no device memory",
    errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST: "loses all work since the last save",
}


@final
class PolicyChecks:
    """Checks the needs of policies, for the plans of one worker.

    Args:
        resources: The resources of the host.
        applications: The checkpointable applications.
        application_store: Their checkpoints on disk.
        disk: The disk space for checkpoints.
        criu: Process images.
        may_claim: Whether preemptible workloads would make room for a program that was refused with an error.
    """

    def __init__(
        self,
        resources: Resources,
        applications: ApplicationRegistry,
        application_store: ApplicationStore,
        disk: CheckpointDirectory,
        criu: CriuSupport,
        may_claim: Callable[[WorkloadSpec, AllocRequest, OperationError], bool],
    ) -> None:
        self._resources = resources
        self._applications = applications
        self._application_store = application_store
        self._disk = disk
        self._criu = criu
        self._may_claim = may_claim

    def check(self, plan: Plan, *, allowed: bool) -> None:
        """Refuses a policy that frees nothing, loses work, or is impossible.

        Args:
            plan: The plan with the policy; it receives the findings.
            allowed: Whether the policy may free nothing, or lose work.
        """
        workload, policy = plan.target.workload, plan.policy
        if policy is None:
            return
        with plan.findings.check("policy", policy_text(policy)):
            self._check_weights(workload, plan)
            if policy.process_strategy in (CHECKPOINT, STOP) and workload.origin != RUN:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_STATE,
                    f"workload {workload.name} was not started by a worker, so a worker can't "
                    "start it again: suspend it by cuda_suspend instead of "
                    f"{process_text(policy.process_strategy)}",
                )
            refusal = strategy_of(policy).refusal
            plan.saves = bool(refusal) and self._is_harmless(workload, refusal)
            if refusal and not self._is_harmless(workload, refusal):
                message = f"{policy_text(policy)} {_SAYS[refusal]}"
                if not allowed:
                    command = forced_command(workload.name, plan.asked_policy)
                    remedy = f"choose another policy, or use `{command}`"
                    raise OperationError(refusal, f"{message}: {remedy}")
                plan.findings.warn("policy", f"{message}, which is permitted")

    def _check_weights(self, workload: Workload, plan: Plan) -> None:
        policy = plan.policy
        if policy is None or policy.process_strategy == STOP or workload.parked is not None:
            return
        weights = policy.weight_strategy
        if weights != RETAIN and not weights_hooks(workload.spec.hooks, weights):
            raise OperationError(
                errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                f"no hook of workload {workload.name} can {weights_text(weights)} its "
                "weights: run it with vllm, sglang, or another hook with frees_memory, or "
                "retain the weights",
                {"field": "policy.weight_strategy"},
            )

    def _is_harmless(self, workload: Workload, refusal: errors_pb2.ErrorReason.ValueType) -> bool:
        """Whether nothing is lost because the application saves itself first."""
        lost = refusal == errors_pb2.ERROR_REASON_STATE_WOULD_BE_LOST
        return lost and workload.state == RUNNING and self._applications.of(workload.workload_id) is not None

    async def look_at_image(self, plan: Plan) -> None:
        """Checks the needs of an image: CRIU, processes that it can write, and room on disk."""
        findings, target = plan.findings, plan.target
        target.processes = target.processes or await target.workload.find_processes()
        with findings.check("criu", "works here"):
            self._criu.require_criu_for(target.workload)
        at_rest = target.workload.state == SUSPENDED
        try:
            for obstacle in await self._criu.obstacles(target.processes, suspended=at_rest):
                error = OperationError(errors_pb2.ERROR_REASON_UNSUPPORTED_STATE, obstacle)
                findings.refuse("processes", error)
            read = partial(image_bytes, target.processes)
            needed = await read_process(target.workload.root.pid, read, is_long=True)
        except OperationError as error:
            findings.refuse("processes", error)
            return
        if not at_rest:
            needed += sum(member.total_bytes for member in target.members)
        await self._look_at_disk(plan, needed)

    async def _look_at_disk(self, plan: Plan, needed_bytes: int | None) -> None:
        # A volume that does not answer refuses no rung: the next one could stop what can be saved later.
        available = await call_volume(self._disk.available_bytes)
        plan.tiers.append(TierNeed(DISK, needed_bytes, available))
        if needed_bytes is None:
            plan.findings.skip("disk", "the application does not know the size of its checkpoint")
            return
        with plan.findings.check("disk", f"about {size_text(needed_bytes)} needed"):
            if needed_bytes > available:
                raise OperationError(
                    errors_pb2.ERROR_REASON_INSUFFICIENT_DISK,
                    f"about {size_text(needed_bytes)} exceed the {size_text(available)} "
                    "available for checkpoints: delete some, or raise checkpoint_limit in "
                    "the worker's settings",
                )

    async def look_at_application(self, plan: Plan) -> None:
        """Checks the needs of a stop: a checkpointable application is able to save itself now."""
        workload = plan.target.workload
        if workload.state != RUNNING or self._applications.of(workload.workload_id) is None:
            plan.findings.skip("application", "not checkpointable, or suspended: nothing is saved")
            return
        await self.look_at_kernel(plan)

    async def look_at_kernel(self, plan: Plan) -> None:
        """Checks the needs of a save: a checkpointable application that agrees, and room on disk."""
        findings, workload = plan.findings, plan.target.workload
        kernel = self._applications.of(workload.workload_id)
        if kernel is None:
            findings.refuse("application", no_kernel(workload))
            return
        with findings.check("application", "can save itself"):
            readiness = await kernel.can_checkpoint()
            if not readiness.ready:
                raise OperationError(
                    errors_pb2.ERROR_REASON_KERNEL_NOT_READY,
                    f"the application of workload {workload.name} can't save itself now: "
                    f"{readiness.reason or 'it does not say why'}; try again later",
                )
        if not plan.refused:
            await self._look_at_disk(plan, await kernel.size_estimate())

    async def look_at_kept_image(self, plan: Plan) -> None:
        """Checks the needs of a restore from an image: CRIU, and an image for this host."""
        workload = plan.target.workload
        plan.checkpoint_id = workload.parked.checkpoint_id if workload.parked else ""
        with plan.findings.check("criu", "works here"):
            self._criu.require_criu_for(workload)
        with plan.findings.check("image", f"{plan.checkpoint_id} is present and fits this host"):
            await self._criu.check_kept(plan.checkpoint_id)
        with plan.findings.check("resources", "there"):
            host = AllocRequest.of(workload.spec.resources).host
            request = AllocRequest(GpuRequest(0), host, plan.hold_id)
            self._resources.alloc(workload.workload_id, request, live=False)
        plan.host_memory = need = self._criu.need(workload)
        with plan.findings.check("host_memory", f"{size_text(need.needed_bytes)} needed"):
            need.check()

    async def look_at_start(self, plan: Plan, operation: operation_pb2.RestoreOperation) -> None:
        """Checks the needs of a restart: free resources, and the checkpoint of the application."""
        findings, workload = plan.findings, plan.target.workload
        parked_id = workload.parked.checkpoint_id if workload.parked else ""
        plan.checkpoint_id = operation.checkpoint_id or parked_id
        with findings.check("pairs", "none"):
            if operation.pairs:
                raise OperationError(
                    errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
                    f"workload {workload.name} is stopped and starts again: name GPUs instead of pairs",
                    {"field": "pairs"},
                )
        request = AllocRequest.of(workload.spec.resources, plan.target.home, operation.hold_id)
        gpu_uuids: Sequence[str] = ()
        is_named = bool(operation.gpu_uuids)
        if is_named:
            with findings.check("destinations", "a GPU for each"):
                gpu_uuids = [normalize_uuid(gpu_uuid) for gpu_uuid in operation.gpu_uuids]
                self._resources.check_named(gpu_uuids, request)
            request = AllocRequest(GpuRequest(0), request.host, request.hold_id)
        with findings.check("resources", "there"):
            taken = self._resources.alloc(
                workload.workload_id, request, live=False, priority=workload.spec.priority
            )
            gpu_uuids = gpu_uuids or taken.gpu_uuids
            plan.destinations = [Destination(gpu_uuid, "", None, None) for gpu_uuid in gpu_uuids]
        for refusal in list(findings.refusals):
            # A preemptible workload does not release a GPU because somebody names the GPU.
            if not is_named and self._may_claim(workload.spec, request, refusal):
                findings.excuse(refusal, "preemptible workloads release their GPUs first")
        if operation.checkpoint_id:
            with findings.check("checkpoint", f"{plan.checkpoint_id} is present"):
                found = await call_volume(self._application_store.find, operation.checkpoint_id)
                plan.tiers.append(TierNeed(DISK, found.file_bytes, None))
            return
        try:
            found_all = await call_volume(self._application_store.scan, workload.workload_id)
        except OperationError as error:
            findings.refuse("checkpoint", error)
            return
        whole = [each for each in found_all if isinstance(each, StoredCheckpoint)]
        if plan.checkpoint_id and not found_all:
            findings.refuse("checkpoint", _gone(plan.checkpoint_id, workload))
        elif whole:
            plan.tiers.append(TierNeed(DISK, whole[0].file_bytes, None))

    def tell_tiers(self, plan: Plan) -> None:
        """Adds the memory tiers that bytes would go to, or come from."""
        workload, policy = plan.target.workload, plan.policy
        if policy is None:
            return
        moved = None if plan.is_unsized else sum(member.total_bytes for member in plan.members)
        told = {need.tier for need in plan.tiers}
        for tier in strategy_of(policy).tiers:
            if tier in told:
                continue
            match tier:
                case _ if tier == HOST:
                    available = plan.host_memory.available_bytes if plan.host_memory else None
                    plan.tiers.append(TierNeed(HOST, moved, available))
                case _ if tier == DEVICE:
                    everything = policy.process_strategy == KEEP_RUNNING and policy.weight_strategy == RETAIN
                    plan.tiers.append(TierNeed(DEVICE, moved if everything else None, None))
                case _ if workload.parked is not None and workload.state in AWAY:
                    plan.tiers.append(TierNeed(DISK, workload.parked.disk_bytes, None))
                case _:
                    plan.tiers.append(TierNeed(tier, None, None))


def _gone(checkpoint_id: str, workload: Workload) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
        f"checkpoint {checkpoint_id} of workload {workload.name} is no longer in the image directory: put it "
        "back, name another one by its id, or stop the workload and run the program again",
        {"checkpoint_id": checkpoint_id},
    )
