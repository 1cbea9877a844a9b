"""The hooks of the workloads of one operation, around the driver's calls."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1.eviction_pb2 import EvictionPolicy

from leasehold_worker.commands.progress import Progress
from leasehold_worker.crash_points import crash_point
from leasehold_worker.driver.members import needed_by_gpu
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import runner
from leasehold_worker.hooks.context import HookContext, HookRecord, KernelSide, calls
from leasehold_worker.planning.plan import WorkloadPlan
from leasehold_worker.programs.environment import user_environment
from leasehold_worker.programs.secret_variables import SealError, SecretVariables
from leasehold_worker.workloads.eviction import CUDA_SUSPEND, RETAIN
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.workload import RUN, Hooked, Workload

logger = logging.getLogger(__name__)

PLAIN: Final = EvictionPolicy(weight_strategy=RETAIN, process_strategy=CUDA_SUSPEND)
"""The policy of workloads that are only moved."""

SMALL_DEADLINE_S: Final = 10.0
"""Time for device memory to fall after a framework reports that it sleeps again."""

SMALL_INTERVAL_S: Final = 0.1


@final
class HookFactory:
    """The contexts of this worker's hooks.

    Args:
        workloads: The registry, with the folder of each workload.
        proof: Verification of members by NVML.
        kernel_of: The checkpointable application of a workload. None: there is none.
        wait_kernel: Waits for the application of a workload, for some seconds at most.
        written: Waits until the workloads' records are on disk, or raises OperationError.
        inherited: Environment that hooks inherit from the worker.
        secrets: Reveals the secret variables of workloads.
    """

    def __init__(
        self,
        workloads: Workloads,
        verification: Verification,
        kernel_of: Callable[[str], KernelSide | None],
        wait_kernel: Callable[[str, float], Awaitable[KernelSide]],
        written: Callable[[], Awaitable[None]],
        inherited: Mapping[str, str],
        secrets: SecretVariables,
    ) -> None:
        self._workloads = workloads
        self._verification = verification
        self._kernel_of = kernel_of
        self._wait_kernel = wait_kernel
        self._written = written
        self._inherited = inherited
        self._secrets = secrets

    async def probe(self, workload: Workload) -> None:
        """Calls the readiness probes of a workload once.

        Raises:
            OperationError: HOOK_FAILED: the application is not ready.
        """
        await runner.probe(self._context(None, WorkloadPlan(workload), HookRecord(), []))

    def operation_hooks(
        self, targets: Sequence[WorkloadPlan], policy: EvictionPolicy | None, progress: Progress
    ) -> "OperationHooks":
        """The hooks of an operation on some workloads.

        Args:
            targets: The workloads, with the records of their hooks.
            policy: Policy of the suspend. None: that of each workload's last suspend, or the plain one.
            progress: Receives failures that are not fatal, as warnings.
        """
        hooked = [target for target in targets if calls(target.workload.spec.hooks)]
        return OperationHooks(hooked, partial(self._context, policy), progress, self._keep)

    async def _keep(self, workload: Workload) -> None:
        """Puts the record of a workload's hooks on disk."""
        self._workloads.report(workload)
        await self._written()
        crash_point("hook-noted")

    def _context(
        self, policy: EvictionPolicy | None, target: WorkloadPlan, record: HookRecord, warnings: list[str]
    ) -> HookContext:
        workload = target.workload
        parked_by = workload.parked.policy if workload.parked else PLAIN
        if workload.hooked is not None:
            parked_by = workload.hooked.policy
        working_folder = self._workloads.working_folder(workload.workload_id, workload.account)
        if workload.account is not None:  # its user can mount a volume on it that hangs: nothing looks there
            working_folder = working_folder if workload.origin == RUN else Path("/")
        elif not working_folder.is_dir():
            working_folder = working_folder.parents[1]
        return HookContext(
            workload_id=workload.workload_id,
            workload_name=workload.name,
            root=workload.root,
            hooks=workload.spec.hooks,
            policy=policy or parked_by,
            member_pids=[member.identity.pid for member in target.members],
            environment={
                **user_environment(self._inherited, workload.account),
                **workload.spec.environment,
                **self._variables(workload),
            },
            working_directory=working_folder,
            account=workload.account,
            measure=partial(self._measure, target),
            wait_kernel=partial(self._wait_kernel, workload.workload_id),
            kernel=self._kernel_of(workload.workload_id),
            record=record,
            warnings=warnings,
        )

    def _variables(self, workload: Workload) -> dict[str, str]:
        """The secret variables, for programs of hooks and their credentials. Empty without the key."""
        try:
            return self._secrets.reveal(workload.workload_id, workload.spec)
        except SealError as error:
            logger.error("hooks of workload %s run without its secret variables: %s", workload.name, error)
            return {}

    async def _measure(self, target: WorkloadPlan) -> int | None:
        """Device bytes that NVML lists for the members now. None: one of them is unknown."""
        members = await self._verification.measured(target.members, target.home)
        if not target.home or not needed_by_gpu(members, target.home).keys() >= set(target.home):
            return None
        return sum(member.total_bytes for member in members)


@final
class OperationHooks:
    """The hooks of one operation. Workloads without hooks cost nothing.

    Args:
        targets: The workloads that have hooks.
        context: The context of one workload's hooks.
        progress: Receives failures that are not fatal, as warnings.
        keep: Stores the record of a workload on disk before it returns.
    """

    def __init__(
        self,
        targets: Sequence[WorkloadPlan],
        context: Callable[[WorkloadPlan, HookRecord, list[str]], HookContext],
        progress: Progress,
        keep: Callable[[Workload], Awaitable[None]],
    ) -> None:
        self._targets = targets
        self._context = context
        self._progress = progress
        self._keep = keep

    @property
    def is_needed(self) -> bool:
        """Whether there are any hooks."""
        return bool(self._targets)

    async def down(self) -> None:
        """Calls the hooks before a suspend, or rolls back those that were called.

        Raises:
            OperationError: HOOK_FAILED or MEMORY_NOT_FREED; all hooks are rolled back; the warnings name
                exceptions.
        """
        called: list[WorkloadPlan] = []
        try:
            for target in self._targets:
                await self._down(target)
                called.append(target)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self._back(called)
            raise

    async def _down(self, target: WorkloadPlan) -> None:
        workload, context = target.workload, self._noting(target)
        workload.note_hooks(workload.hooked or Hooked(context.policy, ()))
        try:
            await runner.down(context)
        except BaseException:  # the runner has rolled back the hooks where that was possible
            self._forget_if_undone(workload)
            raise

    async def up(self) -> None:
        """Calls the hooks after a restore, of all workloads, even if one fails.

        Raises:
            OperationError: HOOK_FAILED, the first.
        """
        errors: list[OperationError] = []
        for target in self._targets:
            context = self._noting(target)
            try:
                await runner.up(context)
                target.workload.note_hooks(None)
            except OperationError as error:
                errors.append(error)
                # The next successful restore removes this record.
                target.workload.note_hooks(target.workload.hooked or Hooked(context.policy, ()))
        if errors:
            raise errors[0]

    async def down_again(self) -> bool:
        """Rolls back the hooks of a failed restore: woken servers sleep again. Failures become warnings.

        Returns:
            Whether all servers sleep as before, according to the hooks and to NVML.
        """
        asleep = True
        for target in self._targets:
            context = self._noting(target)
            target.workload.note_hooks(target.workload.hooked or Hooked(context.policy, ()))
            failures = await runner.down_again(context)
            asleep = asleep and not failures and await self._is_as_small(target, context)
        return asleep

    async def _is_as_small(self, target: WorkloadPlan, context: HookContext) -> bool:
        """Whether a workload holds no more device memory than before. A framework may free memory late."""
        before = sum(member.total_bytes for member in target.members)
        with trio.move_on_after(SMALL_DEADLINE_S):
            while True:
                now = await context.measure()
                if now is None or now <= before:
                    return True
                await trio.sleep(SMALL_INTERVAL_S)
        self._progress.warnings.append(
            f"workload {target.workload.name} was told to sleep again, but uses more of its GPUs than before"
        )
        return False

    async def back(self) -> None:
        """Rolls back the hooks before a suspend, for the workloads that run. Failures become warnings."""
        running = [target for target in self._targets if target.workload.parked is None]
        with trio.CancelScope(shield=True):
            await self._back(running)

    async def _back(self, targets: Sequence[WorkloadPlan]) -> None:
        for target in reversed(targets):
            workload = target.workload
            await runner.roll_back(self._noting(target))
            self._forget_if_undone(workload)
            try:
                await self._keep(workload)
            except OperationError as error:
                self._progress.warnings.append(f"the end of its hooks is not on disk yet: {error.message}")

    def _forget_if_undone(self, workload: Workload) -> None:
        if workload.hooked is not None and not workload.hooked.notes:
            workload.note_hooks(None)
        elif workload.parked is None:
            self._progress.stays_changed = True

    def _noting(self, target: WorkloadPlan) -> HookContext:
        """The context of a workload's hooks. Their progress is on disk before they continue."""
        workload = target.workload

        async def keep(notes: frozenset[str]) -> None:
            before = workload.hooked
            workload.note_hooks(Hooked(context.policy, tuple(sorted(notes))))
            try:
                await self._keep(workload)
            except BaseException:
                workload.note_hooks(before)
                raise

        record = HookRecord(workload.hooked.notes if workload.hooked is not None else (), keep)
        context = self._context(target, record, self._progress.warnings)
        return context
