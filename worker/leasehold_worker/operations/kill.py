"""Kills the processes of a workload without hanging the host.

Killing a process that was restored and runs was seen to hang the whole host (NVIDIA/cuda-checkpoint issue
53). Killing a checkpointed process was not. So the members of a restored workload are suspended first, and
left alone if that fails.

Processes can fork while they are killed. The kernel ends a whole control group (cgroup.kill), and a whole
process group, in one step that no fork escapes, so no freeze is needed. Processes outside of such a group are
searched and killed repeatedly, until a search finds no new one. Where a search may have missed a process, the
newest ones of the host are looked at before the next search: a chain of forks ends in one of them.
"""

import logging
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2

from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.group import Group
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.members import CHECKPOINTED, LOCKED, RUNNING, Member, find_members
from leasehold_worker.driver.process import DEFAULT_LOCK_TIMEOUT_S
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.driver.verification import Verification
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.fork_chains import kill_newest
from leasehold_worker.host.process_readings import SEARCH, user_threads
from leasehold_worker.host.process_trees import ProcessTree, kill_children, kill_tree
from leasehold_worker.host.processes import ProcessIdentity, send_signal, wait_ended
from leasehold_worker.planning.driver_checks import blocked_among
from leasehold_worker.threads import run_in_thread
from leasehold_worker.workloads.workload import Workload, home_of

logger = logging.getLogger(__name__)

ENDING_S: Final = 1.0
"""Time for a member that can't be suspended to end: it may have been told to."""

CHASE_S: Final = 2.0
"""Time for killing processes that start others meanwhile."""

SCAN_PATIENCE_S: Final = 0.05
"""Time for which processes are listed again if some ended before they were read."""

NEWEST_S: Final = 0.2
"""Time for killing the newest process before all are listed again."""

POLL_INTERVAL_S: Final = 0.05

KILL_AGAIN_S: Final = 1.0
"""Time for processes to end before they are killed again."""

FIRST_PAUSE_S: Final = 0.01
LONGEST_PAUSE_S: Final = 0.5
"""Longest pause between two checks whether processes have ended. The pause begins short and doubles."""


@final
class Killer:
    """Kills the processes of one worker's workloads."""

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        rates: Rates,
        end_group: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepares a killer.

        Args:
            driver: Suspends members before they are killed.
            inventory: The GPUs of this host.
            rates: Transfer rates of suspends.
            end_group: Kills the control group of a workload, if there is one, by the workload's id.
        """
        self._end_group = end_group
        self._driver = driver
        self._inventory = inventory
        self._rates = rates

    async def kill(self, workload: Workload, progress: Progress, *, force: bool = False) -> None:
        """Sends SIGKILL to every process of the workload, once that is safe.

        Args:
            workload: The workload; its first process may have ended.
            progress: Receives the outcomes of the members.
            force: Kill members that could not be suspended, too.

        Raises:
            OperationError: UNSAFE_KILL, and no process was killed.
        """
        async with workload.ending:
            if workload.restored and not force:
                await self._park(workload, progress)
            progress.enter("kill")
            self._end_group(workload.workload_id)
            await _kill_all(workload)

    async def kill_suspended(self, workload: Workload) -> None:
        """Sends SIGKILL to the suspended members of a workload, and waits for their end for some time.

        Members that run are left alone. So are those whose state the driver does not report.
        """
        async with workload.ending:
            try:
                members = await find_members(self._driver, [member.identity for member in workload.members])
                suspended = [member.identity for member in members if member.state == CHECKPOINTED]
                for identity in suspended:
                    send_signal(identity, signal.SIGKILL)
            except OperationError as error:
                logger.error(
                    "suspended processes of workload %s may be left, and nobody can restore them: %s",
                    workload.name,
                    error.message,
                )
                return
            with trio.move_on_after(KILL_AGAIN_S):
                for identity in suspended:
                    await wait_ended(identity)

    async def _park(self, workload: Workload, progress: Progress) -> None:
        """Suspends the running members. Members that end, or end CUDA, meanwhile are skipped."""
        while True:
            running: Sequence[Member] = ()
            try:
                running = await self._running_members(workload)
                if not running:
                    return
                lanes = [
                    [member]
                    for member in await Verification(self._inventory).measured(running, home_of(workload))
                ]
                group = Group(self._driver, self._inventory, self._rates, lanes, progress.enter)
                progress.outcomes += [(workload.workload_id, outcome) for outcome in group.outcomes]
                await group.suspend(DEFAULT_LOCK_TIMEOUT_S, _nobody)
            except OperationError as error:
                if await self._become_fewer(workload, running):
                    continue
                is_stopped = error.reason == errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE
                remedy = "resume the process first" if is_stopped else "try again"
                raise OperationError(
                    errors_pb2.ERROR_REASON_UNSAFE_KILL,
                    f"workload {workload.name} runs and can't be suspended before it is "
                    f"killed ({error.message}), and killing a running restored workload can "
                    f"hang the host: {remedy}, or use `--force`",
                    error.metadata,
                ) from error
            else:
                return

    async def _become_fewer(self, workload: Workload, running: Sequence[Member]) -> bool:
        """Whether a member soon ends, or ends CUDA: then the others may be suspended."""
        known = {member.identity for member in running}
        with trio.move_on_after(ENDING_S):
            while True:
                with suppress(OperationError):
                    left = {member.identity for member in await self._running_members(workload)}
                    if not left or known - left:
                        return True
                await trio.sleep(POLL_INTERVAL_S)
        return False

    async def _running_members(self, workload: Workload) -> list[Member]:
        processes = await workload.find_processes()
        for identity, reason in await blocked_among(processes):
            raise OperationError(
                errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE, f"process {identity.pid} is {reason}"
            )
        members = await find_members(self._driver, processes)
        return [member for member in members if member.state in (RUNNING, LOCKED)]


async def wait_gone(workload: Workload) -> bool:
    """Whether all processes of a workload end soon. If not, the kill has to be repeated."""
    with trio.move_on_after(KILL_AGAIN_S):
        pause_s = FIRST_PAUSE_S
        while not await workload.is_gone():  # nothing else tells
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return True
    return False


async def _kill_all(workload: Workload) -> None:
    """Sends SIGKILL to all processes, and to those that they start meanwhile.

    If the search for marked processes hangs, the other processes are killed alone.
    """
    kill_tree(await workload.find_tree())
    for mark in dict.fromkeys((workload.mark, "")):
        with user_threads(workload.uid, SEARCH) as limiter, trio.move_on_after(2 * CHASE_S):
            is_member = workload.membership(mark)
            chase = partial(_chase, workload.scanner(mark), is_member, workload.launcher)
            await run_in_thread(chase, abandon_on_cancel=True, limiter=limiter if mark else None)
            return


def _chase(
    scan: Callable[[float], ProcessTree],
    is_member: Callable[[ProcessIdentity], bool],
    launcher: ProcessIdentity | None,
) -> None:
    """Kills the processes that it finds until a search finds no new one, for CHASE_S.

    Call it in a thread: a marked process that is stuck in the kernel can make it wait forever.
    """
    killed: set[ProcessIdentity] = set()
    deadline = time.monotonic() + CHASE_S
    while time.monotonic() < deadline:
        # A process that forks and exits lives for a moment only: no scan of all processes is as quick.
        while launcher is not None and time.monotonic() < deadline:
            children = kill_children(launcher)
            if killed.issuperset(children):
                break
            killed |= children
        tree = scan(SCAN_PATIENCE_S)
        if time.monotonic() > deadline:
            return  # the scan may be outdated, and the group ids reused by other processes
        kill_tree(tree)
        if tree.complete and killed.issuperset(tree.processes):
            return
        killed |= set(tree.processes)
        if not tree.complete:
            killed |= kill_newest(is_member, NEWEST_S)


async def _nobody() -> tuple[Member, ...]:
    return ()
