"""The registry of this worker's workloads, and the transitions of their states."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, final

from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.change import Change
from leasehold_worker.driver.members import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.files.workload_files import USER_FOLDERS, WORKING_FOLDER
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.processes import ProcessIdentity, may_be_parent
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.programs.programs import launched
from leasehold_worker.secret_values import blank_secrets
from leasehold_worker.workloads.states import AWAY, ENDED, LOST, PARKED, RUNNING, UNKNOWN, check_transition
from leasehold_worker.workloads.workload import RUN, Parked, Workload, parked_bytes

logger = logging.getLogger(__name__)

ENDED_LIMIT: Final = 256
"""Ended workloads that are remembered. The files of older ones are deleted."""

LAST_GPUS_LIMIT: Final = 256
"""Names whose last GPUs are remembered."""


@final
class Workloads:
    """The registry. Every change is reported to the observer, in order, with the workload after it.

    Args:
        pool: The pool that leases the GPUs.
        directory: Parent of the workloads' folders.
        observer: Receives a workload after each change.
    """

    def __init__(
        self,
        pool: GpuPool,
        directory: Path,
        observer: Callable[[Workload], None],
    ) -> None:
        self._pool = pool
        self._directory = directory
        self._observer = observer
        self._by_id: dict[str, Workload] = {}
        self._last_gpus: dict[str, tuple[str, ...]] = {}
        self._changed = Change()

    async def wait_changed(self) -> None:
        """Waits for the next change of any workload."""
        await self._changed.wait()

    def last_gpus(self, name: str) -> tuple[str, ...]:
        """The last GPUs of a workload of this name, since the start of the worker. Empty: none."""
        return self._last_gpus.get(name, ())

    def __contains__(self, workload_id: object) -> bool:
        return workload_id in self._by_id

    def get(self, workload_id: str) -> Workload:
        """The workload with this id.

        Raises:
            OperationError: UNKNOWN_WORKLOAD.
        """
        try:
            return self._by_id[workload_id]
        except KeyError:
            raise OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_WORKLOAD,
                f"no workload {workload_id} on this worker: its program was never started, or ended "
                "long ago; if the worker lost its state directory, end the processes by pid",
            ) from None

    def all(self) -> tuple[Workload, ...]:
        """Every workload, oldest first."""
        return tuple(self._by_id.values())

    def parked_bytes(self) -> int:
        """Host memory of all suspended workloads."""
        return sum(map(parked_bytes, self._by_id.values()))

    def outputs(self) -> list[Path]:
        """The outputs of the workloads that have not ended and whose programs the worker started."""
        living = (each for each in self._by_id.values() if each.state not in ENDED)
        return [workload.output_path for workload in living if workload.origin == RUN]

    def folder(self, workload_id: str) -> Path:
        """The worker's folder of a workload: the records of its shim, and its output."""
        return self._directory / workload_id

    def working_folder(self, workload_id: str, account: Account | None) -> Path:
        """The default working directory of a workload's program.

        That of another Unix user is in a tree whose parents this user can pass through.
        """
        if account is None:
            return self.folder(workload_id) / WORKING_FOLDER
        return self.user_folder(workload_id)

    def user_folder(self, workload_id: str) -> Path:
        """The folder that belongs to a workload's Unix user, if the worker's is another one."""
        return self._directory.parent / USER_FOLDERS / workload_id

    def add(self, workload: Workload) -> None:
        """Adds a workload, and reports it."""
        self._by_id[workload.workload_id] = workload
        workload.launcher = self._launcher_of(workload, workload.root)
        workload.others = partial(self._roots_beside, workload)
        self._tell(workload)
        if workload.state in ENDED:
            workload.ended.set()

    def begin_again(self, workload: Workload, root: ProcessIdentity) -> None:
        """Records that a suspended workload has processes again, below a new first process."""
        workload.begin(root, self._launcher_of(workload, root))

    def set_state(
        self, workload: Workload, state: WorkloadState.ValueType, error: OperationError | None = None
    ) -> None:
        """Changes the state and reports it. An ended workload stays ended.

        Args:
            workload: The workload.
            state: Its new state.
            error: Why it is WEDGED or UNKNOWN. None: as before.

        Raises:
            ValueError: A defect of the worker: there is no such transition.
        """
        if workload.state in ENDED:
            return
        check_transition(workload.state, state)
        if state in LOST:
            workload.error = error or workload.error
        if state == RUNNING or state in PARKED:
            workload.error = None
            workload.home = ()
        if state == RUNNING:
            workload.parked = None
            workload.yielded = False
        if state in AWAY:
            workload.absent = True
            workload.restored = workload.headless = False
        workload.state = state
        workload.generation += 1
        self._tell(workload)

    def report(self, workload: Workload) -> None:
        """Reports the recorded facts of a workload that has not ended."""
        self.set_state(workload, workload.state)

    def lose_checkpoints(self, checkpoint_ids: Collection[str]) -> None:
        """Records and reports the suspended workloads whose checkpoints were deleted."""
        for workload in self._by_id.values():
            parked = workload.parked
            if parked is None or parked.checkpoint_id not in checkpoint_ids or workload.state in ENDED:
                continue
            workload.parked = replace(parked, disk_bytes=0)
            self.report(workload)

    def settle(
        self,
        workload: Workload,
        state: WorkloadState.ValueType,
        members: tuple[Member, ...],
        parked: Parked | None = None,
        *,
        home: tuple[str, ...] = (),
        error: OperationError | None = None,
    ) -> None:
        """Gives a workload the state in which its members were found, once its lease is settled.

        Args:
            workload: The workload.
            state: Its new state.
            members: Its members.
            parked: Record of its suspend. None: it is not suspended.
            home: GPUs from which its members are displaced, if it is UNKNOWN.
            error: Why it is WEDGED or UNKNOWN.

        Raises:
            ValueError: A defect of the worker: there is no such transition. Nothing has changed.
        """
        if workload.state in ENDED:
            return
        check_transition(workload.state, state)
        workload.members, workload.parked, workload.home = members, parked, home
        workload.yielded = workload.yielded and state in PARKED
        self.set_state(workload, state, error)

    def wake(self, workload: Workload, lease: Lease | None) -> None:
        """Gives a suspended workload, which runs again, its lease."""
        workload.hold(lease)
        self.set_state(workload, RUNNING)

    def lose(self, workload: Workload, error: OperationError) -> None:
        """Records that the state of a workload's processes is unknown."""
        self.set_state(workload, UNKNOWN, error)

    def release_lease(self, workload: Workload) -> None:
        """Releases the GPUs of a workload. The next change reports that."""
        if workload.lease is not None:
            self._pool.release(workload.lease)
            workload.hold(None)

    def set_ready(self, workload: Workload) -> None:
        """Records that a workload is ready, and reports it. A ready workload stays ready."""
        if workload.awaits_readiness:
            workload.ready_time = datetime.now(UTC)
            workload.unready = ""
            self.report(workload)

    def set_kernel(self, workload: Workload, kernel: workload_pb2.Kernel | None) -> None:
        """Records the current application of a workload, and reports it."""
        if workload.state not in ENDED and workload.kernel != kernel:
            workload.kernel = kernel
            self.report(workload)

    def end(
        self,
        workload: Workload,
        state: WorkloadState.ValueType,
        error: OperationError | None = None,
        end_time: datetime | None = None,
    ) -> list[Workload]:
        """Ends a workload, releases its GPUs, and forgets the oldest ended ones.

        Args:
            workload: The workload, without processes that the worker manages.
            state: How it has ended.
            error: Why it has ended. None: by itself, or on request.
            end_time: When it has ended. None: now.

        Returns:
            The workloads that are forgotten, whose folders are left.
        """
        self.release_lease(workload)
        workload.parked = workload.kernel = None
        workload.yielded = False
        workload.members = ()
        blank_secrets(workload.spec)
        workload.error = error
        workload.end_time = end_time or datetime.now(UTC)
        self.set_state(workload, state)
        workload.ended.set()
        # A workload that ran for long has begun before all others, and its end is the newest.
        earlier = [each for each in self._by_id.values() if each.state in ENDED and each is not workload]
        earlier.sort(key=lambda each: each.end_time or each.start_time)
        forgotten = earlier[: max(0, len(earlier) + 1 - ENDED_LIMIT)]
        for each in forgotten:
            del self._by_id[each.workload_id]
        return forgotten

    def _tell(self, workload: Workload) -> None:
        if workload.lease is not None:
            self._last_gpus.pop(workload.name, None)
            self._last_gpus[workload.name] = workload.lease.gpu_uuids
            if len(self._last_gpus) > LAST_GPUS_LIMIT:
                del self._last_gpus[next(iter(self._last_gpus))]
        self._observer(workload)
        self._changed.notify()

    def _launcher_of(self, workload: Workload, root: ProcessIdentity) -> ProcessIdentity | None:
        try:
            who = launched(self.folder(workload.workload_id)) if workload.origin == RUN else None
        except OSError as error:
            who = None
            logger.error("workload %s: its launcher is unknown (%s)", workload.name, error)
        # A program can write into its own folder.
        known = who is not None and who.program == root and may_be_parent(who.launcher, who.program)
        return who.launcher if who is not None and known else None

    def _roots_beside(self, workload: Workload) -> list[ProcessIdentity]:
        others = (other for other in self._by_id.values() if other is not workload)
        return [other.root for other in others if other.state not in ENDED and not other.absent]
