"""The end of workloads: their remaining processes are ended, and their resources released."""

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import WorkloadState

from leasehold_worker.commands.progress import Progress
from leasehold_worker.errors import OperationError
from leasehold_worker.operations.kill import Killer, wait_gone
from leasehold_worker.programs.output_bounds import remove_folders
from leasehold_worker.programs.programs import wait_exit
from leasehold_worker.workloads.foreign_processes import ForeignWatch
from leasehold_worker.workloads.host_shares import HostShares
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED, EXITED, IN_OPERATION, RELEASED
from leasehold_worker.workloads.workload import LET_GO, RUN, WORKLOAD_ID_VARIABLE, Workload

logger = logging.getLogger(__name__)

KILL_TIMEOUT_S: Final = 10.0
"""Time for processes to end before their survival is reported."""

WATCH_AGAIN_S: Final = 1.0
POLL_INTERVAL_S: Final = 0.01


@final
class ExitMonitor:
    """Notices the end of workloads, which is the end of their first process.

    Args:
        workloads: The registry.
        host_shares: The host resources of the workloads.
        foreign: Lists the processes on the GPUs of workloads that the worker does not kill.
        killer: Kills the remaining processes of the others.
        socket_path: The worker's local socket.
        on_forgotten: Receives the id of a workload that ended long ago, once its folder is removed.
        nursery: Runs one task per workload.
    """

    def __init__(
        self,
        workloads: Workloads,
        host_shares: HostShares,
        foreign: ForeignWatch,
        killer: Killer,
        socket_path: Path,
        on_forgotten: Callable[[str], None],
        nursery: trio.Nursery,
    ) -> None:
        self._workloads = workloads
        self._host_shares = host_shares
        self._foreign = foreign
        self._killer = killer
        self._socket_path = socket_path.absolute()
        self._on_forgotten = on_forgotten
        self._nursery = nursery
        self._watches: dict[str, trio.CancelScope] = {}
        """The scopes of the tasks, by workload."""

    def add(self, workload: Workload) -> None:
        """Adds a workload to the registry, and monitors its end."""
        self._workloads.add(workload)
        if not workload.absent:
            self.watch(workload)

    def watch(self, workload: Workload) -> None:
        """Monitors the workload's end, by its current first process."""
        self.stop(workload)
        if workload.state in ENDED:
            return
        watching = self._watches[workload.workload_id] = trio.CancelScope()
        self._nursery.start_soon(self._watch, workload, watching)

    def stop(self, workload: Workload) -> None:
        """Detaches the workload from its processes, whose end no longer ends it."""
        if self.watches(workload):
            self._watches.pop(workload.workload_id).cancel()

    def watches(self, workload: Workload) -> bool:
        """Whether the end of the workload is monitored."""
        return workload.workload_id in self._watches

    async def let_go(self, workload: Workload) -> None:
        """Ends a workload whose processes continue unmanaged, without a lease.

        Their GPUs are checked first, so that no claim is granted a GPU that they use.
        """
        await self._foreign.look(self._workloads, leaving=workload)
        if workload.state not in ENDED:  # it may have ended during the scan
            self.stop(workload)
            self.end(workload, RELEASED)

    def end(
        self,
        workload: Workload,
        state: WorkloadState.ValueType,
        error: OperationError | None = None,
        end_time: datetime | None = None,
    ) -> None:
        """Ends a workload without remaining processes, and releases its resources."""
        self._host_shares.give_back(workload)
        for forgotten in self._workloads.end(workload, state, error, end_time):
            self._nursery.start_soon(self._forget, forgotten)

    async def _forget(self, workload: Workload) -> None:
        workload_id = workload.workload_id
        folder, user_folder = self._workloads.folder(workload_id), self._workloads.user_folder(workload_id)
        await remove_folders(folder, user_folder, workload.account)
        self._on_forgotten(workload_id)

    async def _watch(self, workload: Workload, watching: trio.CancelScope) -> None:
        with watching:
            while True:
                try:
                    await self._see_out(workload)
                except OSError as error:  # too few descriptors or too little memory
                    logger.error("workload %s can't be monitored for now: %s", workload.name, error)
                    await trio.sleep(WATCH_AGAIN_S)
                else:
                    break
            if self._watches.get(workload.workload_id) is watching:
                del self._watches[workload.workload_id]

    async def _see_out(self, workload: Workload) -> None:
        """Waits for a workload's end, ends its remaining processes, and releases its lease."""
        outcome = await wait_exit(self._workloads.folder(workload.workload_id), workload.root)
        orphan_mark = ""
        if outcome is None and workload.origin == RUN:
            # The launcher was killed before its program ended: orphans can be anywhere since then.
            # Another worker of this host may have a workload of this id, and has another socket.
            socket = f"LEASEHOLD_SOCKET={self._socket_path}"
            orphan_mark = f"{WORKLOAD_ID_VARIABLE}={workload.workload_id}\0{socket}"
        workload.note_exit(outcome.returncode if outcome else None, orphan_mark)
        how = "the exit was not observed" if outcome is None else f"exit {outcome.returncode}"
        logger.info("workload %s ended: %s", workload.name, how)
        if workload.origin in LET_GO:
            await self._leave_rest(workload)
        else:
            if workload.restored:
                await _wait_operation(workload)
            await self._end_rest(workload)
        end_time = datetime.fromtimestamp(outcome.end_time, UTC) if outcome else None
        self.end(workload, EXITED, end_time=end_time)

    async def _leave_rest(self, workload: Workload) -> None:
        """Leaves the remaining processes of a workload running, and kills those that are suspended.

        An operation may still restore suspended members on their GPUs, so the workload keeps its lease until
        the operation has ended. Nobody could restore a suspended member after the end of the workload. An
        operation may begin, and even end, during the search for the remaining processes.
        """
        while True:
            await _wait_operation(workload)
            state = workload.state
            await self._killer.kill_suspended(workload)
            await self._foreign.look(self._workloads, leaving=workload)
            if workload.state == state:
                return

    async def _end_rest(self, workload: Workload) -> None:
        """Kills the remaining processes of a workload whose first one has ended, to free its GPUs.

        A process that survives keeps the GPUs: the workload is UNKNOWN meanwhile, and the kill is repeated.
        """
        deadline = trio.current_time() + KILL_TIMEOUT_S
        while not await workload.is_gone():
            try:
                await self._killer.kill(workload, Progress.unheard())
                error = OperationError(
                    errors_pb2.ERROR_REASON_DRIVER_ERROR,
                    f"processes of workload {workload.name} are stuck in the kernel, or start others faster "
                    "than they can be killed: its GPUs stay leased",
                )
            except OperationError as refused:
                error = refused
            if await wait_gone(workload):
                return
            if trio.current_time() >= deadline:
                deadline = trio.current_time() + KILL_TIMEOUT_S
                logger.error("%s", error.message)
                self._workloads.lose(workload, error)


async def _wait_operation(workload: Workload) -> None:
    """Waits until no operation moves the workload. Every operation has its deadlines."""
    while workload.state in IN_OPERATION:  # noqa: ASYNC110 - nothing else tells
        await trio.sleep(POLL_INTERVAL_S)
