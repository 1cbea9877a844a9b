"""The registry of this worker's workloads, from start to end."""

import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadSpec, WorkloadState

from leasehold_worker.errors import OperationError
from leasehold_worker.files.workload_files import OUTPUT_FILE
from leasehold_worker.host.cgroup_limits import ResourceLimits
from leasehold_worker.host.processes import ProcessIdentity, may_be_parent
from leasehold_worker.leasing.host_reservations import HostReservation, HostReservations
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.programs.programs import forget_start, launched, wait_exit
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.program_start import ProgramStart
from leasehold_worker.workloads.states import ENDED, EXITED, IN_OPERATION, RELEASED, UNKNOWN
from leasehold_worker.workloads.workload import LET_GO, RUN, WORKLOAD_ID_VARIABLE, Workload

logger = logging.getLogger(__name__)

ENDED_LIMIT: Final = 256
"""Ended workloads that are remembered. The files of older ones are deleted."""

LAST_GPUS_LIMIT: Final = 256
"""Names whose last GPUs are remembered."""

KILL_TIMEOUT_S: Final = 10.0
"""Time for processes to end before their survival is reported."""

KILL_AGAIN_S: Final = 1.0
"""Time for processes to end before they are killed again."""

WATCH_AGAIN_S: Final = 1.0
POLL_INTERVAL_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5
"""Longest pause between two checks whether processes have ended. The pause begins short and doubles."""


@final
class Workloads:
    """The registry. Every change is reported to the observer, in order, with the workload after it."""

    def __init__(
        self,
        pool: GpuPool,
        directory: Path,
        observer: Callable[[Workload], None],
        on_forgotten: Callable[[str], None],
        kill: Callable[[Workload], Awaitable[None]],
        look: Callable[[Workload], Awaitable[None]],
        ledger: HostReservations,
        limits: ResourceLimits,
        socket_path: Path,
        inherited: Mapping[str, str],
        user: str,
    ) -> None:
        self.user = user
        """Name of the worker's user, which programs run as."""
        self.inherited = inherited
        """Environment that programs and hooks inherit from the worker."""
        self.programs = ProgramStart(limits, inherited, socket_path)
        self.host_shares = HostShares(ledger, limits)
        self._pool = pool
        self.limits = limits
        self._look = look
        self._socket_path = socket_path.absolute()
        self._kill = kill
        self._directory = directory
        self._observer = observer
        self._on_forgotten = on_forgotten
        self._by_id: dict[str, Workload] = {}
        self._last_gpus: dict[str, tuple[str, ...]] = {}
        self._changed = trio.Event()

    async def wait_changed(self) -> None:
        """Waits for the next change of any workload."""
        await self._changed.wait()

    def last_gpus(self, name: str) -> tuple[str, ...]:
        """The last GPUs of a workload of this name, since the start of the worker. Empty: none."""
        return self._last_gpus.get(name, ())

    def _tell(self, workload: Workload) -> None:
        if workload.lease is not None:
            self._last_gpus.pop(workload.name, None)
            self._last_gpus[workload.name] = workload.lease.gpu_uuids
            if len(self._last_gpus) > LAST_GPUS_LIMIT:
                del self._last_gpus[next(iter(self._last_gpus))]
        self._observer(workload)
        self._changed.set()
        self._changed = trio.Event()

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
                f"no workload {workload_id} on this worker: if the worker crashed, end its processes by pid",
            ) from None

    def all(self) -> tuple[Workload, ...]:
        """Every workload, oldest first."""
        return tuple(self._by_id.values())

    def set_state(self, workload: Workload, state: WorkloadState.ValueType) -> None:
        """Changes the state and reports it. An ended workload stays ended."""
        if workload.state in ENDED:
            return
        workload.state = state
        workload.generation += 1
        self._tell(workload)

    def set_ready(self, workload: Workload) -> None:
        """Records that a workload is ready, and reports it. A ready workload stays ready."""
        if workload.awaits_readiness:
            workload.ready_time = datetime.now(UTC)
            workload.unready = ""
            workload.generation += 1
            self._tell(workload)

    def set_kernel(self, workload: Workload, kernel: workload_pb2.Kernel | None) -> None:
        """Records the current application of a workload, and reports it."""
        if workload.state not in ENDED and workload.kernel != kernel:
            workload.kernel = kernel
            workload.generation += 1
            self._tell(workload)

    async def spawn(
        self,
        workload_id: str,
        name: str,
        spec: WorkloadSpec,
        lease: Lease | None,
        host: HostReservation,
        nursery: trio.Nursery,
        *,
        restores: bool = False,
    ) -> Workload:
        """Starts the workload's program, in a session of its own, and monitors its end.

        The program and its output, which goes to a file, outlive the worker.

        Args:
            workload_id: Its id.
            name: Its name.
            spec: Its spec.
            lease: Its GPUs. None: it has none.
            host: Its host resources other than GPUs.
            nursery: Runs the task that monitors it.
            restores: Its application waits for a restore.

        Raises:
            OperationError: SPAWN_FAILED; nothing was started.
        """
        root = await self.programs.start(
            self.folder(workload_id), workload_id, name, spec, lease, host, nursery, restores=restores
        )
        workload = Workload(
            workload_id,
            name,
            spec,
            root,
            self.folder(workload_id) / OUTPUT_FILE,
            datetime.now(UTC),
            lease,
            user=self.user,
            uid=os.geteuid(),
            host=host,
        )
        self.add(workload, nursery)
        return workload

    async def start_again(
        self, workload: Workload, lease: Lease | None, nursery: trio.Nursery, *, restores: bool
    ) -> None:
        """Starts the program of a workload whose processes have ended, on the GPUs of a lease.

        Its output continues in the same file. No task monitors its end yet.

        Raises:
            OperationError: SPAWN_FAILED; nothing was started.
        """
        if workload.host is None:
            raise ValueError("a program is started with what its workload holds of the host")
        folder = self.folder(workload.workload_id)
        forget_start(folder)
        workload.root = await self.programs.start(
            folder,
            workload.workload_id,
            workload.name,
            workload.spec,
            lease,
            workload.host,
            nursery,
            restores=restores,
        )
        workload.absent = False
        workload.ready_time = None
        workload.unready = ""
        workload.begun_s = time.monotonic()

    def outputs(self) -> list[Path]:
        """The outputs of the workloads that have not ended and whose programs the worker started."""
        living = (each for each in self._by_id.values() if each.state not in ENDED)
        return [workload.output_path for workload in living if workload.origin == RUN]

    def folder(self, workload_id: str) -> Path:
        """The folder of a workload's files."""
        return self._directory / workload_id

    def add(self, workload: Workload, nursery: trio.Nursery, *, watched: bool = True) -> None:
        """Adds a workload to the registry, and monitors its end.

        Args:
            workload: The workload.
            nursery: Runs the task that monitors it.
            watched: False: recovery has to check its state first, and begins the monitoring.
        """
        self._by_id[workload.workload_id] = workload
        self._find_launcher(workload)
        workload.others = partial(self._roots_beside, workload)
        self._tell(workload)
        if workload.state in ENDED:
            workload.ended.set()
        elif watched and not workload.absent:
            nursery.start_soon(self._watch, workload, workload.watching)

    def stop_watching(self, workload: Workload) -> None:
        """Detaches the workload from its processes, whose end no longer ends it."""
        workload.watching.cancel()

    def watch_again(self, workload: Workload, nursery: trio.Nursery) -> None:
        """Monitors the workload's end again, by its current first process."""
        workload.watching.cancel()
        workload.watching = trio.CancelScope()
        workload.headless = False
        self._find_launcher(workload)
        nursery.start_soon(self._watch, workload, workload.watching)

    def _find_launcher(self, workload: Workload) -> None:
        try:
            who = launched(self.folder(workload.workload_id)) if workload.origin == RUN else None
        except OSError as error:
            who = None
            logger.error("workload %s: its launcher is unknown (%s)", workload.name, error)
        # A program can write into its own folder.
        known = who is not None and who.program == workload.root and may_be_parent(who.launcher, who.program)
        workload.launcher = who.launcher if who is not None and known else None

    def _roots_beside(self, workload: Workload) -> list[ProcessIdentity]:
        others = (other for other in self._by_id.values() if other is not workload)
        return [other.root for other in others if other.state not in ENDED and not other.absent]

    async def let_go(self, workload: Workload) -> None:
        """Ends a workload whose processes continue unmanaged, without a lease.

        Their GPUs are checked first, so that no claim is granted a GPU that they use.
        """
        await self._look(workload)
        if workload.state in ENDED:  # meanwhile
            return
        workload.watching.cancel()
        workload.end_time = datetime.now(UTC)
        self.end(workload, RELEASED, None)
        self._forget_oldest()

    async def _watch(self, workload: Workload, watching: trio.CancelScope) -> None:
        with watching:
            await self._watch_to_the_end(workload)

    async def _watch_to_the_end(self, workload: Workload) -> None:
        while True:
            try:
                await self._see_out(workload)
            except OSError as error:  # for want of descriptors or memory
                logger.error("workload %s can't be monitored for now: %s", workload.name, error)
                await trio.sleep(WATCH_AGAIN_S)
            else:
                return

    async def _see_out(self, workload: Workload) -> None:
        """Waits for a workload's end, ends its remaining processes, and releases its lease."""
        outcome = await wait_exit(self.folder(workload.workload_id), workload.root)
        workload.returncode = outcome.returncode if outcome else None
        workload.headless = True
        if outcome is None and workload.origin == RUN:
            # The launcher was killed before its program ended: orphans can be anywhere since then.
            # Another worker of this host may have a workload of this id, and has another socket.
            marks = (
                f"{WORKLOAD_ID_VARIABLE}={workload.workload_id}",
                f"LEASEHOLD_SOCKET={self._socket_path}",
            )
            workload.mark = workload.mark or "\0".join(marks)
        how = "the exit was not observed" if outcome is None else f"exit {outcome.returncode}"
        logger.info("workload %s ended: %s", workload.name, how)
        while workload.restored and workload.state in IN_OPERATION:  # noqa: ASYNC110 - it has its deadlines
            await trio.sleep(POLL_INTERVAL_S)
        if workload.origin in LET_GO:
            await self._look(workload)
        else:
            await self._end_rest(workload)
        workload.end_time = datetime.fromtimestamp(outcome.end_time, UTC) if outcome else datetime.now(UTC)
        self.end(workload, EXITED, None)
        self._forget_oldest()

    def end_without_processes(self, workload: Workload) -> None:
        """Ends a workload that is suspended without processes."""
        workload.end_time = datetime.now(UTC)
        self.end(workload, EXITED, None)
        self._forget_oldest()

    def end(self, workload: Workload, state: WorkloadState.ValueType, error: OperationError | None) -> None:
        """Ends a workload without remaining processes, and releases its resources."""
        self.host_shares.give_back(workload)
        if workload.lease is not None:
            self._pool.release(workload.lease)
            workload.lease = None
        workload.parked = workload.kernel = None
        workload.yielded = False
        workload.members = ()
        workload.error = error
        self.set_state(workload, state)
        workload.ended.set()

    async def _end_rest(self, workload: Workload) -> None:
        """Kills the remaining processes of a workload whose first one has ended, to free its GPUs.

        A process that survives keeps the GPUs: the workload is UNKNOWN meanwhile, and the kill is repeated.
        """
        deadline = trio.current_time() + KILL_TIMEOUT_S
        while not await workload.is_gone():
            try:
                await self._kill(workload)
                error = OperationError(
                    errors_pb2.ERROR_REASON_DRIVER_ERROR,
                    f"processes of workload {workload.name} are stuck in the kernel, or start others faster "
                    "than they can be killed: its GPUs stay leased",
                )
            except OperationError as refused:
                error = refused
            with trio.move_on_after(KILL_AGAIN_S):
                pause_s = POLL_INTERVAL_S
                while not await workload.is_gone():  # nothing else tells
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                return
            if trio.current_time() < deadline:
                continue
            deadline = trio.current_time() + KILL_TIMEOUT_S
            logger.error("%s", error.message)
            workload.error = error
            self.set_state(workload, UNKNOWN)

    def _forget_oldest(self) -> None:
        ended = [workload for workload in self._by_id.values() if workload.state in ENDED]
        for workload in ended[: max(0, len(ended) - ENDED_LIMIT)]:
            del self._by_id[workload.workload_id]
            self._on_forgotten(workload.workload_id)
