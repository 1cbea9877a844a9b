"""Foreign processes on this host's GPUs: NVML lists them, and they belong to no workload with a lease.

A workload's own process is foreign on a GPU that the workload does not lease: it ignored its variables, or it
began after the workload had moved.

While NVML can't list the processes of a GPU that a workload leaves, the GPU is not leased to another.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, final

import trio

from leasehold_worker.gpus.inventory import GpuUsage, Inventory
from leasehold_worker.host.process_files import read_stat
from leasehold_worker.host.process_readings import read_process
from leasehold_worker.host.processes import (
    ProcessIdentity,
    cancel_at_end,
    command_line,
    has_real_user,
    identify,
    is_alive,
    lineage,
    user_id,
    user_name,
    variable_of,
)
from leasehold_worker.leasing.leases import ForeignProcess, LeaseId
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.log_format import printable
from leasehold_worker.threads import run_in_thread
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.states import ENDED, IN_OPERATION
from leasehold_worker.workloads.workload import WORKLOAD_ID_VARIABLE, Workload

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S: Final = 5.0
"""Age that the list of foreign processes may have for a claim that is granted while it waits."""

LOOK_AGAIN_S: Final = 1.0
"""Wait before the next look while a GPU is kept back because NVML could not list its processes."""

ENDING_S: Final = 0.05
"""Time for which NVML may list a process after its end."""

LOOK_TIMEOUT_S: Final = 15.0
TELL_TIMEOUT_S: Final = 4.0
"""Time for reading the facts of processes that NVML does not report. Reading the arguments of a process that
is stuck in the kernel can take forever, and so can a directory service that looks up a user's name."""

PROCESSES_LIMIT: Final = 16
"""Foreign processes that are reported per GPU: all of them might not fit into a frame."""

COMMAND_LIMIT: Final = 200
"""Characters of a foreign command line that are reported."""

NOT_LISTED: Final = "NVML can't list the processes of this GPU, and these may be on it: "


def owner(pid: int, workloads: Iterable[Workload], marked_id: str | None = None) -> Workload | None:
    """The workload that a process belongs to: by descent, by its session or by its mark.

    Args:
        pid: The process.
        workloads: The workloads; ended ones are ignored.
        marked_id: The workload id that the process was started with, "" for none. None: the call reads it,
            which can take forever.
    """
    living = {workload.workload_id: workload for workload in workloads if workload.state not in ENDED}
    return living.get(_holder_id(pid, _holders(living.values()), marked_id))


async def check_living(workloads: Workloads, pid: int, check: Callable[[Collection[Workload]], None]) -> None:
    """Checks a process against all workloads with processes, in a thread, also those that begin meanwhile.

    Until the next checkpoint after the call, the registry has no workload that was not checked.

    Args:
        workloads: The registry.
        pid: The process, whose user decides the thread.
        check: Raises an OperationError if the process must not be related to one of these workloads.

    Raises:
        OperationError: As of ``check``. TARGET_NOT_RUNNABLE: the process can't be read.
    """
    checked: set[tuple[str, ProcessIdentity]] = set()
    while unchecked := {
        (workload.workload_id, workload.root): workload
        for workload in workloads.all()
        if workload.state not in ENDED
        and not workload.absent
        and (workload.workload_id, workload.root) not in checked
    }:
        await read_process(pid, partial(check, tuple(unchecked.values())))
        checked |= unchecked.keys()


async def read_mark(pid: int) -> str:
    """The workload id that a process was started with. Empty: none.

    Raises:
        OperationError: TARGET_NOT_RUNNABLE: the process can't be read.
    """
    return await read_process(pid, partial(variable_of, pid, WORKLOAD_ID_VARIABLE))


class _Holder(NamedTuple):
    workload_id: str
    root: ProcessIdentity
    launcher: ProcessIdentity | None
    """Parent of its orphans."""
    name: str
    generation: int
    uid: int | None
    """Real user of its marked processes and session orphans: every user can set the variable."""
    asleep_on: Collection[str]
    """GPUs on which it keeps a CUDA context without a lease."""
    settled: bool
    """No operation moves the workload, so that its GPUs are those of its lease."""


def _holders(workloads: Iterable[Workload]) -> list[_Holder]:
    return [
        _Holder(
            each.workload_id,
            each.root,
            each.launcher,
            each.name,
            each.generation,
            each.uid,
            each.parked.gpu_uuids if each.parked and each.is_asleep else (),
            each.state not in IN_OPERATION,
        )
        for each in workloads
        if each.state not in ENDED and not each.absent
    ]


def _changed(holders: Iterable[_Holder], workloads: Workloads) -> set[str]:
    """The workloads that have changed since, or that are no longer known."""
    return {
        holder.workload_id
        for holder in holders
        if holder.workload_id not in workloads
        or workloads.get(holder.workload_id).generation != holder.generation
    }


def _holder_id(pid: int, holders: Collection[_Holder], marked_id: str | None) -> str:
    """The id of the workload that a process belongs to. Empty: none."""
    by_root = {holder.launcher: holder.workload_id for holder in holders if holder.launcher}
    by_root |= {holder.root: holder.workload_id for holder in holders}
    by_session: dict[int, _Holder] = {holder.root.pid: holder for holder in holders}
    for identity, session_id in lineage(pid):
        if identity in by_root:
            return by_root[identity]
        holder = by_session.get(session_id)
        if holder is not None and _is_in_session(identity, holder):
            return holder.workload_id
    marked_id = variable_of(pid, WORKLOAD_ID_VARIABLE) if marked_id is None else marked_id
    uids = {holder.workload_id: holder.uid for holder in holders}
    return marked_id if has_real_user(pid, uids.get(marked_id)) else ""


def _is_in_session(identity: ProcessIdentity, holder: _Holder) -> bool:
    """Whether a session with the number of a first process is the session of that very process.

    The kernel uses the number again once all processes of a session have ended.
    """
    leader = read_stat(holder.root.pid)
    if leader is None:
        return has_real_user(identity.pid, holder.uid)
    return leader.start_time_ticks == holder.root.start_time_ticks


@final
class ForeignWatch:
    """Keeps the pool's list of foreign processes current."""

    def __init__(self, inventory: Inventory, pool: GpuPool) -> None:
        self._inventory = inventory
        self._pool = pool
        self._turn = trio.Lock()
        self._looks = 0
        self._free_bytes: Mapping[str, int] = {}
        self._listed: set[str] = set()
        """GPUs whose processes NVML has listed at some time."""
        self._kept_back: dict[str, list[ProcessIdentity]] = {}
        """GPUs that a workload has left and that were not listed since, with the remaining processes."""
        self._telling = trio.CapacityLimiter(1)
        """Held while all facts of processes are read, and forever by a thread that hangs."""
        self._sorting = trio.CapacityLimiter(1)
        """Held while only facts are read that the kernel gives without waiting."""

    async def run(self, workloads: Workloads) -> None:
        """Looks repeatedly, and as soon as a foreign process has ended, until cancelled."""
        while True:
            await self.look(workloads)
            with trio.move_on_after(LOOK_AGAIN_S if self._kept_back else LOOK_INTERVAL_S):
                async with trio.open_nursery() as nursery:
                    for identity in self._foreign_processes():
                        nursery.start_soon(cancel_at_end, identity, nursery.cancel_scope)
                    await trio.sleep_forever()

    def _foreign_processes(self) -> list[ProcessIdentity]:
        slots = self._pool.slots.snapshot().slots
        try:
            found = [identify(process.pid) for slot in slots for process in slot.foreign]
        except OSError as error:  # too few descriptors or too little memory
            logger.warning("foreign processes can't be listed for now: %s", error)
            return []
        return [identity for identity in found if identity is not None]

    async def look(self, workloads: Workloads, leaving: Workload | None = None) -> None:
        """Looks for foreign processes now. Callers that wait at the same time share one look.

        Without an answer from NVML, the last list stays. The GPUs of a leaving workload are then kept back,
        as if its remaining processes were on them, until NVML lists them.

        Args:
            workloads: The workloads of the worker.
            leaving: A workload that counts as gone. It must be gone before another operation begins.
        """
        begun = self._looks
        left = await _left(leaving) if leaving is not None else []
        seen: Collection[str] = ()
        with trio.move_on_after(LOOK_TIMEOUT_S):
            async with self._turn:
                if self._looks > begun + 1 and leaving is None:
                    return
                self._looks += 1
                seen = await self._look(workloads, leaving)
        if leaving is not None and leaving.lease is not None:
            for gpu_uuid in leaving.lease.gpu_uuids:
                if gpu_uuid not in seen:
                    self._keep_back(gpu_uuid, leaving, left)

    async def _look(self, workloads: Workloads, leaving: Workload | None) -> Collection[str]:
        """Looks, and returns the GPUs that NVML listed."""
        before = self._leases()
        lessees = {
            slot.gpu_uuid: slot.lease.workload_id if slot.lease else ""
            for slot in self._pool.slots.snapshot().slots
        }
        try:
            usage = await run_in_thread(_usage, self._inventory, abandon_on_cancel=True)
            ours = _holders(workload for workload in workloads.all() if workload is not leaving)
            found = await self._sort(usage, ours, lessees)
        except OSError as error:  # too few descriptors or threads, or too little memory
            logger.warning("the processes on the GPUs can't be listed for now: %s", error)
            usage, ours, found = {}, [], _Found({}, {})
        now = self._leases()
        changed = _changed(ours, workloads)
        for workload_id in found.present - changed:
            self._note_cuda(workloads.get(workload_id), workloads)
        # GPUs whose lease has changed meanwhile are left out: the rightful user is unknown.
        # NVML lists the GPUs of other workers of this host too.
        ours_now = now.keys() & found.foreign.keys()
        same = {gpu_uuid for gpu_uuid in ours_now if before.get(gpu_uuid) == now[gpu_uuid]}
        seen = {
            gpu_uuid: tuple(
                process for process in who if now[gpu_uuid] is None or process.workload_id not in changed
            )
            for gpu_uuid, who in found.foreign.items()
            if gpu_uuid in same
        }
        asleep = {gpu_uuid: kept for gpu_uuid, kept in found.asleep_bytes.items() if gpu_uuid in same}
        self._listed |= seen.keys()
        self._kept_back = {uuid: left for uuid, left in self._kept_back.items() if uuid not in seen}
        self._free_bytes = _free_bytes(usage, self._pool)
        self._pool.slots.observe({**seen, **self._over()}, self._free_bytes, asleep)
        return seen.keys()

    @staticmethod
    def _note_cuda(workload: Workload, workloads: Workloads) -> None:
        """Marks a workload without a readiness probe as ready once one of its processes uses CUDA."""
        if not workload.has_probe:
            workloads.set_ready(workload)

    def _leases(self) -> dict[str, LeaseId | None]:
        slots = self._pool.slots.snapshot().slots
        return {slot.gpu_uuid: slot.lease.lease_id if slot.lease else None for slot in slots}

    async def _sort(
        self, usage: Mapping[str, GpuUsage], ours: Collection[_Holder], lessees: Mapping[str, str]
    ) -> "_Found":
        """The foreign processes per GPU, and the memory of sleeping workloads. Empty after a timeout.

        A thread that hangs is abandoned. Meanwhile processes are reported without the facts that block it.
        """
        fully = not self._telling.borrowed_tokens
        limiter = self._telling if fully else self._sorting
        with trio.move_on_after(TELL_TIMEOUT_S):
            return await run_in_thread(
                _Sorting(usage, ours, lessees, fully).sort, abandon_on_cancel=True, limiter=limiter
            )
        logger.warning("the processes on the GPUs can't be read: one of them may be stuck in the kernel")
        return _Found({}, {})

    def _keep_back(self, gpu_uuid: str, leaving: Workload, left: Iterable[ProcessIdentity]) -> None:
        """Keeps a GPU from other workloads while its processes are unknown.

        A GPU whose processes NVML never lists is not kept back if no process of the workload is known to
        live: that would last forever.
        """
        living = [identity for identity in left if _may_live(identity)]
        if not living and gpu_uuid not in self._listed:
            return
        names = leaving.name if living else f"possible remains of {leaving.name}"
        told = living[:PROCESSES_LIMIT] or [leaving.root]
        command = f"{NOT_LISTED}{names}"[:COMMAND_LIMIT]
        entry = tuple(ForeignProcess(identity.pid, leaving.user, command, None) for identity in told)
        logger.warning("GPU %s is not leased for now: %s", gpu_uuid, command)
        self._kept_back[gpu_uuid] = living
        self._pool.slots.observe({gpu_uuid: entry}, self._free_bytes)

    def _over(self) -> dict[str, tuple[ForeignProcess, ...]]:
        """Readmits kept-back GPUs whose processes have ended and that NVML no longer lists. Returns them."""
        over = [
            gpu_uuid
            for gpu_uuid, left in self._kept_back.items()
            if gpu_uuid not in self._listed and not any(map(_may_live, left))
        ]
        for gpu_uuid in over:
            del self._kept_back[gpu_uuid]
        return dict.fromkeys(over, ())


async def _left(leaving: Workload) -> list[ProcessIdentity]:
    try:
        return await leaving.find_processes()
    except OSError:  # too few descriptors or too little memory
        return [leaving.root]


def _may_live(identity: ProcessIdentity) -> bool:
    try:
        return is_alive(identity)
    except OSError:  # too few descriptors or too little memory
        return True


def _usage(inventory: Inventory) -> Mapping[str, GpuUsage]:
    """The processes on each GPU. A process that is listed but not visible has just ended, or is hidden."""
    usage = inventory.usage()
    if all(user_id(pid) is not None for gpu in usage.values() for pid in gpu.processes):
        return usage
    time.sleep(ENDING_S)
    return inventory.usage()


class _Found(NamedTuple):
    foreign: dict[str, tuple[ForeignProcess, ...]]
    """Processes outside of workloads with a lease, by GPU."""
    asleep_bytes: dict[str, int | None]
    """Memory of sleeping workloads, by GPU. None: unknown to NVML."""
    present: frozenset[str] = frozenset()
    """Workloads with a process that NVML lists on any GPU."""


@dataclass(frozen=True, slots=True)
class _Sorting:
    """Separates foreign processes from others. It may block, and reads no state that changes meanwhile.

    Attributes:
        usage: The processes on each GPU.
        ours: The workloads, whose processes are not foreign.
        lessees: Id of the workload that leases a GPU, by GPU. Empty: none, and all processes there are
            foreign.
        fully: Read also the facts that can take forever: marks, arguments and users' names.
    """

    usage: Mapping[str, GpuUsage]
    ours: Collection[_Holder]
    lessees: Mapping[str, str]
    fully: bool

    def sort(self) -> _Found:
        """The foreign processes per GPU, and the memory of sleeping workloads there."""
        marked_id = None if self.fully else ""
        pids = {pid for gpu in self.usage.values() for pid in gpu.processes}
        holder_ids = {pid: _holder_id(pid, self.ours, marked_id) for pid in pids}
        holders = {holder.workload_id: holder for holder in self.ours}
        found = _Found({}, {}, frozenset(filter(None, holder_ids.values())))
        for gpu_uuid, gpu in self.usage.items():
            sleepers = {each.workload_id for each in self.ours if gpu_uuid in each.asleep_on}
            found.asleep_bytes[gpu_uuid] = _kept_bytes(gpu, sleepers, holder_ids)
            foreign = sorted(
                pid for pid in gpu.processes if not self._may_be_on(gpu_uuid, holders.get(holder_ids[pid]))
            )
            told = [
                self._describe(pid, gpu.processes[pid], holders.get(holder_ids[pid]))
                for pid in foreign[:PROCESSES_LIMIT]
            ]
            found.foreign[gpu_uuid] = tuple(told)
        return found

    def _may_be_on(self, gpu_uuid: str, holder: _Holder | None) -> bool:
        """Whether a process of a workload uses a GPU that the workload leases."""
        if holder is None:
            return False
        lessee = self.lessees.get(gpu_uuid, "")
        by_right = lessee == holder.workload_id or gpu_uuid in holder.asleep_on
        return by_right or (bool(lessee) and not holder.settled)

    def _describe(self, pid: int, size: int | None, holder: _Holder | None) -> ForeignProcess:
        uid = user_id(pid)
        workload_id, name = (holder.workload_id, holder.name) if holder is not None else ("", "")
        if not self.fully:
            return ForeignProcess(pid, "" if uid is None else str(uid), "", size, workload_id, name)
        command = printable(" ".join(command_line(pid)))[:COMMAND_LIMIT]
        return ForeignProcess(pid, user_name(uid), command, size, workload_id, name)


def _kept_bytes(gpu: GpuUsage, sleepers: Collection[str], holder_ids: Mapping[int, str]) -> int | None:
    """Memory that sleeping workloads keep on a GPU. None: unknown to NVML."""
    pids = [pid for pid in gpu.processes if holder_ids[pid] in sleepers]
    # Every sleeping workload keeps a context, and NVML does not list all of them.
    if len({holder_ids[pid] for pid in pids}) < len(sleepers):
        return gpu.used_bytes
    return gpu.held_bytes(pids)


def _free_bytes(usage: Mapping[str, GpuUsage], pool: GpuPool) -> dict[str, int]:
    totals = {gpu.uuid: gpu.memory_bytes for gpu in pool.slots.gpus}
    return {
        gpu_uuid: total - gpu.used_bytes
        for gpu_uuid, gpu in usage.items()
        if (total := totals.get(gpu_uuid)) is not None and gpu.used_bytes is not None
    }
