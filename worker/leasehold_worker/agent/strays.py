"""Programs that this worker started and that are missing in its journal, for example after its loss.

Each has a launcher, whose folder identifies the program. The environment of a program proves nothing, since
the program can change it. Processes with a workload's mark but without a launcher, such as those of
`leasehold exec`, are only reported: a mark can be forged.
"""

import logging
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, workload_pb2

from leasehold_worker.agent.assembly import Parts
from leasehold_worker.errors import OperationError
from leasehold_worker.files.workload_files import require_folder_name
from leasehold_worker.host.accounts import Account, account_of
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import ProcessIdentity, boot_id, command_line, is_alive, variable_of
from leasehold_worker.programs.programs import Started, launched, started
from leasehold_worker.workloads.states import ENDED, UNKNOWN
from leasehold_worker.workloads.workload import WORKLOAD_ID_VARIABLE, told_arguments

logger = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
"""Pattern of a workload's name, as in the coordinator."""

SEARCH_TIMEOUT_S: Final = 10.0
"""Timeout of the search, which a process stuck in the kernel can block."""

REPORTS_LIMIT: Final = 64
"""Marked processes that are reported: one line of the log each."""


@dataclass(frozen=True, slots=True)
class Stray:
    """A running program, according to its folder.

    Attributes:
        workload_id: Id of its folder.
        name: Its name.
        program: The first process.
        arguments: Its arguments.
        gpu_uuids: GPUs on which NVML lists its processes, else those of its start by the worker's record.
        is_listed: Whether NVML lists its processes.
        account: Its Unix user. None: the worker's.
    """

    workload_id: str
    name: str
    program: ProcessIdentity
    arguments: tuple[str, ...]
    gpu_uuids: tuple[str, ...]
    is_listed: bool
    account: Account | None


@final
class Strays:
    """Registers strays before any claim can get their GPUs.

    Args:
        parts: The parts, with the workloads that the journal knows.
        folder: Parent of the workloads' folders.
        socket_path: The worker's socket, which marks its own processes.
    """

    def __init__(self, parts: Parts, folder: Path, socket_path: Path) -> None:
        self._parts = parts
        self._folder = folder
        self._socket = str(socket_path.absolute())

    async def take_back(self, expected: Collection[str]) -> None:
        """Registers running programs as workloads, and reports those that can't be registered.

        Args:
            expected: Ids of workloads whose start was interrupted: their commands settle them.
        """
        workloads = self._parts.workloads.all()
        known = {workload.workload_id for workload in workloads} | set(expected)
        over = {
            workload.workload_id
            for workload in workloads
            if workload.state in ENDED or (workload.absent and workload.workload_id not in expected)
        }
        with trio.move_on_after(SEARCH_TIMEOUT_S) as search:
            living = await trio.to_thread.run_sync(self._find, known - over, abandon_on_cancel=True)
            found = [stray for stray in living if stray.workload_id not in over]
            # A suspended one may have lost its GPUs to others.
            found.sort(key=lambda stray: not stray.is_listed)
            for stray in found:
                self._register(stray)
            for stray in living:
                if stray.workload_id in over:
                    logger.error(
                        "the program of workload %s still runs as process %d, although the "
                        "journal has the workload as ended or without processes: end that process",
                        stray.workload_id,
                        stray.program.pid,
                    )
            ids = known | {stray.workload_id for stray in found}
            marked = await trio.to_thread.run_sync(self._marked, ids, abandon_on_cancel=True)
            for pid, workload_id in marked:
                logger.error(
                    "process %d carries the mark of the unknown workload %r: adopt it with "
                    "`leasehold adopt`, or end it",
                    pid,
                    workload_id,
                )
        if search.cancelled_caught:
            logger.error(
                "the search for programs without a journal entry timed out after %g s: a "
                "process may be stuck in the kernel",
                SEARCH_TIMEOUT_S,
            )

    def _find(self, known: Collection[str]) -> list[Stray]:
        """The running programs without a workload. It may block."""
        this_boot = boot_id()
        found = []
        for folder in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
            try:
                require_folder_name(folder.name)
                who = None if folder.name in known else launched(folder)
            except OperationError:
                continue  # no program was started from this folder
            except OSError as error:
                logger.error(
                    "the record of the program started in %s can't be read: %s", folder, error.strerror
                )
                continue
            if who is not None and who.boot_id == this_boot and is_alive(who.program):
                found.append(_describe(folder, who.program, self._parts))
        return found

    def _marked(self, known: Collection[str]) -> list[tuple[Pid, str]]:
        """Processes with the mark of an unknown workload of this worker. It may block."""
        found = []
        for pid in _pids():
            workload_id = variable_of(pid, WORKLOAD_ID_VARIABLE)
            unknown = workload_id and workload_id not in known
            if unknown and variable_of(pid, "LEASEHOLD_SOCKET") == self._socket:
                found.append((pid, workload_id[:64]))
        return found[:REPORTS_LIMIT]

    def _register(self, stray: Stray) -> None:
        pool = self._parts.pool
        free = pool.slots.unleased()
        mine = [gpu_uuid for gpu_uuid in stray.gpu_uuids if gpu_uuid in free]
        others = [gpu_uuid for gpu_uuid in stray.gpu_uuids if gpu_uuid not in free]
        spec = workload_pb2.WorkloadSpec(
            arguments=told_arguments(stray.arguments),
            resources=workload_pb2.Resources(gpu_count=len(stray.gpu_uuids)),
        )
        lease = pool.occupy(stray.workload_id, mine) if mine else None
        workload = self._parts.programs.workload(
            stray.workload_id, stray.name, spec, stray.program, lease, None, account=stray.account
        )
        workload.take_back()
        self._parts.host_shares.take_back(workload)
        self._parts.exit_monitor.add(workload)
        logger.warning(
            "workload %s (%s) runs as process %d and was missing in the journal: it is "
            "managed again, without its hooks, limits and policies",
            workload.name,
            workload.workload_id,
            stray.program.pid,
        )
        if others:
            error = OperationError(
                errors_pb2.ERROR_REASON_WRONG_STATE,
                f"workload {workload.name} may be on {', '.join(others)}, which can't be leased to it: "
                "if it is suspended, restore it, which takes other GPUs; else stop it, or the workload that "
                "leases that GPU",
            )
            logger.error("%s", error.message)
            self._parts.workloads.settle(workload, UNKNOWN, (), home=stray.gpu_uuids, error=error)


def _describe(folder: Path, program: ProcessIdentity, parts: Parts) -> Stray:
    inventory, workload_id = parts.inventory, folder.name
    record = started(folder)
    if record is None:
        logger.error(
            "the record of the start of workload %s is missing or damaged: it gets the GPUs on which NVML "
            "lists its processes; stop it if it has others",
            workload_id,
        )
        record = Started("", ())
    pids = {identity.pid for identity in process_tree(program)}
    listed = [uuid for uuid, gpu in inventory.usage().items() if pids & gpu.processes.keys()]
    began = [uuid for uuid in record.gpu_uuids if uuid in inventory.chips]
    gpu_uuids = began if not listed or set(listed) == set(began) else listed
    # A program of the worker's own user could change the record, and the coordinator refuses invalid names.
    name = record.name if _NAME.fullmatch(record.name) else workload_id
    unique = tuple(dict.fromkeys(gpu_uuids))
    account = _account(program, parts.workloads.user_folder(workload_id))
    arguments = tuple(command_line(program.pid))
    return Stray(workload_id, name, program, arguments, unique, bool(listed), account)


def _account(program: ProcessIdentity, user_folder: Path) -> Account | None:
    """The Unix user for which the worker had made a folder. None: the worker's own.

    The folder itself is not looked at: its user can mount a volume on it that hangs or refuses.
    """
    try:
        has_folder = user_folder.name in os.listdir(user_folder.parent)
    except FileNotFoundError:
        return None
    account = account_of(program.pid) if has_folder else None
    return account if account is not None and account.uid not in (0, os.geteuid()) else None


def _pids() -> Iterator[Pid]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            yield Pid(int(entry.name))
