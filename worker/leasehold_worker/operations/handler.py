"""The operations run, suspend, restore and remap, from the command to the strategy.

Each begins with its plan. The policy decides how a workload is suspended, and a restore undoes that. A
suspend releases the lease, a restore claims GPUs again, and the GPU pairs follow from the new GPUs.
"""

from collections.abc import Iterable, Mapping
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2
from leasehold.v1.eviction_pb2 import ProcessStrategy
from leasehold.worker.v1.session_pb2 import CommandSpec

from leasehold_worker.checkpoints.directory import CheckpointDirectory
from leasehold_worker.checkpoints.volume_calls import delete_in_volume
from leasehold_worker.commands.execution import CarryOut
from leasehold_worker.commands.intents import Intent, WorkloadIntent
from leasehold_worker.commands.ledger import preempted_by
from leasehold_worker.commands.progress import Progress
from leasehold_worker.commands.states import SUCCEEDED
from leasehold_worker.driver.members import FAILED
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.files.workload_files import require_folder_name
from leasehold_worker.leasing.cordons import Cordons
from leasehold_worker.leasing.holds import Holds, HoldTerms
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.operations.acquisition import Acquisition
from leasehold_worker.operations.adoption import Adoption
from leasehold_worker.operations.cuda_suspend import CudaSuspend
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.operations.image_checkpoint import ImageCheckpoint
from leasehold_worker.operations.keep_running import KeepRunning
from leasehold_worker.operations.placement import Placement
from leasehold_worker.operations.run_rules import check_run
from leasehold_worker.operations.stop_restart import STOP_POLICY, StopRestart
from leasehold_worker.operations.strategy import Strategy
from leasehold_worker.operations.termination import Termination
from leasehold_worker.planning.durations import Durations, Way
from leasehold_worker.planning.plan import MoveDown, Plan
from leasehold_worker.planning.preflight import Preflight
from leasehold_worker.planning.workload_checks import require_stopped
from leasehold_worker.workloads import eviction
from leasehold_worker.workloads.eviction import ladder, policy_text, resolve
from leasehold_worker.workloads.program_start import ProgramStart
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import PARKED, PARKED_BY, RUNNING, SLEEPING, STOPPED, WEDGED

PLACEMENT_ATTEMPTS: Final = 3
"""Attempts to choose GPUs for a restore: another claim may take them before they are reserved."""

NOT_ESCALATED: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_INVALID_ARGUMENT,
        errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
        errors_pb2.ERROR_REASON_NOT_READY,
        errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE,
        errors_pb2.ERROR_REASON_TARGET_CRASHED,
        errors_pb2.ERROR_REASON_INTERNAL,
    }
)
"""Failures that would also hit a stronger process strategy."""


_ABOUT_GPUS: Final = frozenset(
    {
        errors_pb2.ERROR_REASON_NO_FREE_GPU,
        errors_pb2.ERROR_REASON_INCOMPATIBLE_GPU,
        errors_pb2.ERROR_REASON_INSUFFICIENT_DEVICE_MEMORY,
    }
)
"""Refusals of a restore that other GPUs could end."""


@final
class Operations:
    """The operations on the workloads of one worker."""

    def __init__(
        self,
        workloads: Workloads,
        acquisition: Acquisition,
        holds: Holds,
        programs: ProgramStart,
        exit_monitor: ExitMonitor,
        *,
        preflight: Preflight,
        cuda_suspend: CudaSuspend,
        keep_running: KeepRunning,
        image_checkpoint: ImageCheckpoint,
        stop_restart: StopRestart,
        termination: Termination,
        adoption: Adoption,
        cordons: Cordons,
        disk: CheckpointDirectory,
        durations: Durations,
    ) -> None:
        self._workloads = workloads
        self._acquisition = acquisition
        self._holds = holds
        self._placement = Placement(holds)
        self._programs = programs
        self._exit_monitor = exit_monitor
        self._cuda_suspend = cuda_suspend
        self._keep_running = keep_running
        self._stop_restart = stop_restart
        self._strategies: Mapping[ProcessStrategy.ValueType, Strategy] = {
            eviction.KEEP_RUNNING: keep_running,
            eviction.CUDA_SUSPEND: cuda_suspend,
            eviction.CHECKPOINT: image_checkpoint,
            eviction.STOP: stop_restart,
        }
        self._termination = termination
        self._adoption = adoption
        self._cordons = cordons
        self._disk = disk
        self._durations = durations
        self.preflight = preflight
        """Makes the plans of suspends, restores and remaps."""

    async def perform(self, command: CommandSpec, progress: Progress, carry_out: CarryOut) -> None:
        """Carries out a command.

        Raises:
            OperationError: The operation failed or was refused. UNSUPPORTED_CAPABILITY: it is unknown to this
                worker.
        """
        workload_id, operation = command.workload_id, command.operation
        match operation.WhichOneof("kind"):
            case "run":
                self._require_leases(preempted_by(command))
                async with self._placement.room_for(command, operation.run, progress, carry_out) as run:
                    await self.run(workload_id, run, progress, command.owner)
            case "suspend":
                with self._holds.begun_by(workload_id, HoldTerms.of(command)):
                    await self.suspend(workload_id, operation.suspend, progress, carry_out)
                progress.hold_id = command.command_id if command.command_id in self._holds else ""
                self._durations.learn(workload_id, progress.policy, Way.DOWN, progress)
            case "restore":
                self._require_leases(preempted_by(command))
                parked = self._workloads.get(workload_id).parked
                restore = operation.restore
                async with self._placement.room_for(command, restore, progress, carry_out) as restore:
                    await self.restore(workload_id, restore, progress)
                self._durations.learn(workload_id, parked.policy if parked else None, Way.UP, progress)
            case "remap":
                await self.remap(operation.remap, progress)
            case "stop":
                stopped = self._workloads.get(workload_id)
                await self._termination.stop(workload_id, operation.stop, progress)
                await self._disk.clean_up_in_time(stopped)
            case "adopt":
                await self._adoption.adopt(workload_id, operation.adopt, progress, command.owner)
            case "release":
                await self._adoption.release(workload_id, progress)
            case "cordon":
                await trio.lowlevel.checkpoint()
                self._cordons.cordon(operation.cordon)
            case "uncordon":
                await trio.lowlevel.checkpoint()
                self._cordons.uncordon(operation.uncordon)
            case "release_hold":
                await trio.lowlevel.checkpoint()
                self._holds.release(operation.release_hold.hold_id)
            case "checkpoint":
                await self._stop_restart.checkpoint(workload_id, progress)
                self._durations.learn(workload_id, STOP_POLICY, Way.DOWN, progress)
            case "delete_checkpoints":
                deletion = operation.delete_checkpoints
                ids, force = deletion.checkpoint_ids, deletion.force
                await delete_in_volume(lambda begin: self._disk.delete(ids, force=force, check=begin))
                self._workloads.lose_checkpoints(ids)
            case "reset_gpu_health":
                await self._cordons.reset_health(operation.reset_gpu_health)
            case None:
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_CAPABILITY,
                    "this worker is older than the coordinator and does not know the operation: update it",
                )

    def _require_leases(self, preempted: Iterable[str]) -> None:
        """Refuses to preempt a running workload without a GPU.

        Its suspend frees nothing for the command. A failure restores the workloads that the hold names, and a
        hold names no workload without a GPU.

        Raises:
            OperationError: INVALID_ARGUMENT.
        """
        for workload_id in preempted:
            if workload_id not in self._workloads:
                continue  # its suspend is refused
            workload = self._workloads.get(workload_id)
            if workload.state == RUNNING and workload.lease is None:
                raise invalid(
                    "preempt",
                    f"workload {workload.name} holds no GPU, so to preempt it frees none: leave it out, or "
                    "suspend it first by a command of its own",
                )

    async def run(
        self, workload_id: str, operation: operation_pb2.RunOperation, progress: Progress, owner: str = ""
    ) -> None:
        """Allocates the resources of the program, without waiting, and starts it.

        Args:
            workload_id: Id of the new workload.
            operation: The program.
            progress: Receives the effects.
            owner: The owner, who decides about the program's Unix user. Empty: unknown.

        Raises:
            OperationError: WORKLOAD_EXISTS: the id is taken; NOT_PERMITTED: ``run_as`` maps no
                Unix user to the owner; or the reason why the program can't start.
        """
        require_folder_name(workload_id)
        if workload_id in self._workloads:
            raise OperationError(
                errors_pb2.ERROR_REASON_WORKLOAD_EXISTS,
                f"workload id {workload_id} is that of workload {self._workloads.get(workload_id).name}: "
                "run it under a new id",
                {"field": "workload_id"},
            )
        spec = operation.spec
        check_run(operation)
        account = await self._programs.run_as.account(owner)
        if operation.checkpoint_id:
            await self._stop_restart.require_checkpoint(operation.checkpoint_id)
        allocation = await self._acquisition.for_run(workload_id, operation, progress)
        lease = allocation.lease
        progress.enter("spawn")
        try:
            target = WorkloadIntent(workload_id, (), (), lease.gpu_uuids if lease else (), parked=False)
            await progress.intend(
                Intent("run", (target,), reserved=(lease,) if lease else (), account=account)
            )
            self._stop_restart.expect(workload_id, operation.checkpoint_id)
            restores = bool(operation.checkpoint_id)
            root = await self._programs.start(
                workload_id, operation.name, spec, lease, account, progress.warnings, restores=restores
            )
        except BaseException:
            self._stop_restart.expect(workload_id, "")
            allocation.release()
            raise
        allocation.hand_over_lease()
        workload = self._programs.workload(
            workload_id, operation.name, spec, root, lease, allocation.host, owner, account
        )
        self._exit_monitor.add(workload)
        progress.claimed_gpu_uuids = workload.gpu_uuids
        if operation.checkpoint_id:
            await self._stop_restart.begin_with(workload, operation.checkpoint_id, progress)

    async def check_run(self, operation: operation_pb2.RunOperation, owner: str) -> None:
        """Refuses what :meth:`run` would refuse now, and changes nothing.

        Raises:
            OperationError: The refusal.
        """
        check_run(operation)
        await self._programs.run_as.account(owner)
        if operation.checkpoint_id:
            await self._stop_restart.require_checkpoint(operation.checkpoint_id)
        self._require_leases(operation.preempt)
        for workload_id in operation.preempt:
            (await self.preflight.suspend(workload_id, operation_pb2.SuspendOperation())).require()
        if not operation.preempt:  # with preempt, the resources are free only after the suspends
            await self._acquisition.check_run(operation)

    async def check_adoption(self, operation: operation_pb2.AdoptOperation, owner: str) -> None:
        """Refuses what an adoption would refuse now, and changes nothing.

        Raises:
            OperationError: The refusal.
        """
        await self._adoption.check(operation, owner)

    async def suspend(
        self,
        workload_id: str,
        operation: operation_pb2.SuspendOperation,
        progress: Progress,
        carry_out: CarryOut | None = None,
    ) -> None:
        """Suspends a workload by its policy, or by a stronger one after a failure that was rolled back.

        Args:
            workload_id: The workload.
            operation: The policy and its options.
            progress: Receives the outcomes.
            carry_out: Moves other workloads to a lower tier. None: no workload can be moved.

        Raises:
            OperationError: The error of the first policy; the warnings of the report have the others.
        """
        workload = self._workloads.get(workload_id)
        asked = operation.policy if operation.HasField("policy") else None
        rungs = [rung.process_strategy for rung in ladder(resolve(asked, workload.spec.eviction))]
        before = (workload.state, workload.hooked)
        yielded_before = workload.yielded
        tried: list[ProcessStrategy.ValueType] = []
        first: OperationError | None = None
        while True:
            progress.enter("preflight")
            plan = await self.preflight.suspend(workload_id, operation, tried)
            try:
                if plan.moves_down and not plan.refused:
                    if carry_out is not None:
                        await make_room(plan.moves_down, progress, carry_out)
                    plan = await self.preflight.suspend(workload_id, operation, tried)
                    plan.require_room()
                if not self._is_settled(plan, progress):
                    # A preemptible workload that had yielded before stays so.
                    stays_yielded = plan.is_parked and workload.yielded
                    workload.note_yield(yielded=operation.gives_way or stays_yielded)
                    await self._suspend(plan, progress)
                progress.policy = plan.policy
                return
            except OperationError as error:
                first = first or error
                workload.note_yield(yielded=yielded_before and workload.state in PARKED)
                is_as_before = (workload.state, workload.hooked) == before
                if plan.policy is None or not is_as_before or error.reason in NOT_ESCALATED:
                    raise
                tried += rungs[: rungs.index(plan.policy.process_strategy) + 1]
                if rungs[-1] in tried:
                    raise first from None
                how = "was not possible" if plan.refused else "failed and was rolled back"
                progress.warnings.append(f"{policy_text(plan.policy)} {how}: {error.message}")

    async def _suspend(self, plan: Plan, progress: Progress) -> None:
        if plan.policy is None:
            raise ValueError("a plan that suspends has a policy")
        await self._strategies[plan.policy.process_strategy].suspend(plan, progress)

    async def restore(
        self, workload_id: str, operation: operation_pb2.RestoreOperation, progress: Progress
    ) -> None:
        """Restores a suspended workload by any strategy: reserves GPUs, and undoes the suspend.

        Raises:
            OperationError: The operation failed and was rolled back, unless the report says otherwise.
        """
        progress.enter("preflight")
        workload = self._workloads.get(workload_id)
        named = bool(operation.gpu_uuids or operation.pairs)
        if operation.checkpoint_id:
            require_stopped(workload)
        if workload.is_half_awake and not named:
            await self._keep_running.call_up(workload, progress)
            return
        if workload.state == STOPPED:
            plan = await self.preflight.restore(workload_id, operation)
            if not self._is_settled(plan, progress):
                await self._stop_restart.restore(plan, (), progress)
            return
        request = None
        if workload.state != SLEEPING:
            request = await self._acquisition.request_of_helpers(workload, operation)
        lent = None
        if request is not None:
            plan = await self.preflight.restore(workload_id, operation)
            if _lacks_gpus(plan):
                refusal = next(iter(plan.findings.refusals), None)
                lent = await self._acquisition.from_helpers(workload, request, refusal, progress)
        if lent is not None:
            await self._restore_on(lent, progress)
            return
        for attempt in range(PLACEMENT_ATTEMPTS):
            plan = await self.preflight.restore(workload_id, operation)
            if self._is_settled(plan, progress):
                return
            try:
                reserved = self._acquisition.reserve(plan)
                break
            except OperationError:  # another claim was faster
                if named or attempt == PLACEMENT_ATTEMPTS - 1:
                    raise
        await self._wake(plan, reserved, progress)

    async def _restore_on(self, lease: Lease, progress: Progress) -> None:
        """Restores a workload on GPUs that were claimed for it."""
        try:
            named = operation_pb2.RestoreOperation(gpu_uuids=lease.gpu_uuids)
            plan = await self.preflight.restore(lease.workload_id, named, held=lease.gpu_uuids)
            plan.require()
            progress.warnings += plan.findings.warnings
        except BaseException:
            self._acquisition.release([lease])
            raise
        await self._wake(plan, [lease], progress)

    async def _wake(self, plan: Plan, reserved: list[Lease], progress: Progress) -> None:
        strategy = self._strategies[PARKED_BY.get(plan.target.workload.state, eviction.CUDA_SUSPEND)]
        try:
            await strategy.restore(plan, reserved, progress)
        finally:
            self._acquisition.release(reserved)
        _warn_of_move(plan, progress)

    async def remap(self, operation: operation_pb2.RemapOperation, progress: Progress) -> None:
        """Moves running workloads: suspends them, and restores them on their new or else their old GPUs."""
        progress.enter("preflight")
        plan = await self.preflight.remap(operation)
        if self._is_settled(plan, progress):
            return
        reserved = self._acquisition.reserve(plan)
        try:
            await self._cuda_suspend.remap(plan, reserved, progress)
        finally:
            self._acquisition.release(reserved)
        _warn_of_move(plan, progress)

    def _note_failed(self, plan: Plan) -> None:
        """Marks workloads as WEDGED after the driver has set a member to FAILED, which is permanent."""
        for target in plan.targets:
            failed = [member.identity.pid for member in target.members if member.state == FAILED]
            if failed and target.workload.state == RUNNING:
                error = OperationError(
                    errors_pb2.ERROR_REASON_MEMBER_WEDGED,
                    f"process {failed[0]} is permanently FAILED: stop the workload",
                    {"pid": str(failed[0])},
                )
                self._workloads.settle(target.workload, WEDGED, target.members, error=error)

    def _is_settled(self, plan: Plan, progress: Progress) -> bool:
        """Whether there is nothing to do.

        Raises:
            OperationError: The first refusal of the plan.
        """
        self._note_failed(plan)
        plan.require()
        for target in plan.targets:  # NVML may list no process of a container
            if target.members and not target.workload.has_probe:
                self._workloads.set_ready(target.workload)
        progress.warnings += plan.findings.warnings
        progress.already_there = plan.already_there
        return plan.already_there


def _lacks_gpus(plan: Plan) -> bool:
    """Whether nothing but GPUs is missing: helpers are suspended for no restore that is refused anyway."""
    return all(refusal.reason in _ABOUT_GPUS for refusal in plan.findings.refusals)


def _warn_of_move(plan: Plan, progress: Progress) -> None:
    """Adds the warnings that hold after a move."""
    if progress.applied_pairs:
        progress.warnings += plan.move_warnings


async def make_room(moves: Iterable[MoveDown], progress: Progress, carry_out: CarryOut) -> None:
    """Moves other workloads to a lower tier, one after the other. A failed move is a warning.

    A cancellation takes effect between two moves, and a move that has ended stays.
    """
    for move in moves:
        await trio.lowlevel.checkpoint_if_cancelled()
        progress.enter("make_room")
        operation = operation_pb2.Operation(
            suspend=operation_pb2.SuspendOperation(policy=move.policy, force=True)
        )
        with trio.CancelScope(shield=True):  # a cancelled wait would leave the move running
            outcome = await carry_out(move.workload_id, operation, move.generation)
        if outcome.state != SUCCEEDED:
            progress.warnings.append(f"workload {move.name} freed no memory: {outcome.error.message}")
        else:
            progress.warnings.append(move.text)
            progress.stays_changed = True
