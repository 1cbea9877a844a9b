"""One workload: what it is, where it stands, and its processes."""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadOrigin, WorkloadSpec, WorkloadState

from leasehold_worker.driver.members import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_readings import SEARCH, user_threads
from leasehold_worker.host.process_trees import ProcessTree, scan_tree
from leasehold_worker.host.processes import ProcessIdentity, identify
from leasehold_worker.leasing.host_reservations import HostReservation
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.workloads.probes import probes
from leasehold_worker.workloads.states import ENDED, RUNNING

logger = logging.getLogger(__name__)


KEEP_RUNNING: Final = workload_pb2.PROCESS_STRATEGY_KEEP_RUNNING


PATIENCE_S: Final = 0.2
"""How long processes are listed again where it matters that none is missed."""

MARKS_TIMEOUT_S: Final = 2.0
"""How long the search for marked processes may take, which one that is stuck in the kernel holds up."""

RUN: Final = workload_pb2.WORKLOAD_ORIGIN_RUN
EXEC: Final = workload_pb2.WORKLOAD_ORIGIN_EXEC
CLAIM: Final = workload_pb2.WORKLOAD_ORIGIN_CLAIM
ADOPT: Final = workload_pb2.WORKLOAD_ORIGIN_ADOPT
LET_GO: Final = frozenset({CLAIM, ADOPT})
"""Origins of workloads whose processes are not ours to end when the first has ended."""

WORKLOAD_ID_VARIABLE: Final = "LEASEHOLD_WORKLOAD_ID"
ARGUMENTS_LIMIT: Final = 4096
"""Characters of the arguments of programs that we did not start, which are told and not used."""


@dataclass(frozen=True, slots=True)
class Parked:
    """What waking a workload needs to know.

    Attributes:
        gpu_uuids: GPUs that it held, in its order.
        device_memory_bytes: What it needs again, by the GPU that it was on; missing where NVML couldn't say.
        policy: How it was parked, which waking undoes.
        since: When.
        host_bytes: What of that is in the host's memory. None: all.
        checkpoint_id: What it is restored from. Empty: its processes, or nothing.
        disk_bytes: Bytes on disk that it is parked as.
    """

    gpu_uuids: tuple[str, ...]
    device_memory_bytes: Mapping[str, int]
    policy: workload_pb2.EvictionPolicy
    since: datetime
    host_bytes: int | None = None
    checkpoint_id: str = ""
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Hooked:
    """A way down that the hooks of a workload have gone and have not come back from.

    Attributes:
        policy: What they were called with.
        notes: How far they went.
    """

    policy: workload_pb2.EvictionPolicy
    notes: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Workload:
    """A process tree of this worker. It ends with its first process.

    Its state is changed through :class:`Workloads`, which tells the observer.
    """

    workload_id: str
    name: str
    spec: WorkloadSpec
    root: ProcessIdentity
    output_path: Path
    start_time: datetime
    lease: Lease | None
    state: WorkloadState.ValueType = RUNNING
    generation: int = 1
    members: tuple[Member, ...] = ()
    home: tuple[str, ...] = ()
    """GPUs from which the displacements of its members lead, while it is UNKNOWN and may hold others."""
    parked: Parked | None = None
    end_time: datetime | None = None
    returncode: int | None = None
    error: OperationError | None = None
    headless: bool = False
    """Its first process has ended; others may be left."""
    ended: trio.Event = field(default_factory=trio.Event)
    restored: bool = False
    """Whether members were restored: killing them while they run could hang the host."""
    ending: trio.Lock = field(default_factory=trio.Lock)
    """Held by whoever is killing its processes."""
    origin: WorkloadOrigin.ValueType = RUN
    user: str = ""
    """Name of the user that its first process runs as, to be shown."""
    uid: int | None = None
    """Id of that user. Users are compared by their ids, and nobody has the id None."""
    host: HostReservation | None = None
    """What it holds of the host beside GPUs, until it has ended."""
    mark: str = ""
    """Variable by which processes of its user are known, wherever they went. Empty: none are marked."""
    launcher: ProcessIdentity | None = None
    """The parent of its first process, which gets its orphans. None: nobody of ours."""
    absent: bool = False
    """It is parked without processes: who bears the pid of its first one now is a stranger."""
    hooked: Hooked | None = None
    """What its hooks have put away. None: nothing, or all of it is back."""
    kernel: workload_pb2.Kernel | None = None
    """The kernel that its application serves now."""
    yielded: bool = False
    """It is a helper that was parked for somebody else's sake, and is woken once GPUs are spare."""
    ready_time: datetime | None = None
    """When the program became ready. None: it is not ready."""
    begun_s: float = field(default_factory=time.monotonic)
    """When readiness was first waited for, of the monotonic clock."""
    unready: str = ""
    """Why the readiness probe failed the last time."""
    watching: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Around the wait for its end."""
    others: Callable[[], Collection[ProcessIdentity]] = field(default=tuple, repr=False)
    """Says the first processes of the other living workloads; given by the registry."""

    @property
    def is_asleep(self) -> bool:
        """Whether its processes run, though it is parked and holds no GPU."""
        return self.parked is not None and self.parked.policy.process_strategy == KEEP_RUNNING

    @property
    def is_half_awake(self) -> bool:
        """Whether it runs, though not all that its hooks put away is back."""
        return self.state == RUNNING and self.hooked is not None

    @property
    def has_probe(self) -> bool:
        """Whether its spec names a readiness probe."""
        return bool(probes(self.spec.hooks))

    @property
    def awaits_readiness(self) -> bool:
        """Whether it runs and is not ready."""
        return self.state == RUNNING and self.ready_time is None

    @property
    def trouble(self) -> OperationError | None:
        """Why it is not as it should be. None: it is."""
        if not self.is_half_awake:
            return self.error
        return OperationError(
            errors_pb2.ERROR_REASON_HOOK_FAILED,
            f"workload {self.name} runs, but some of its hooks failed after the restore: the "
            "worker retries them for some minutes, and `leasehold wake` retries them at any "
            "time",
        )

    async def find_processes(self) -> list[ProcessIdentity]:
        """Its processes that live now, by start time.

        The worker and other workloads are left out with all that is below them, though they may descend from
        its first process, or have inherited its mark. If the search for marked processes hangs, processes
        that are only marked are left out.
        """
        return list((await self.find_tree()).processes)

    async def is_gone(self) -> bool:
        """Whether no process of it is left, and none can have been missed."""
        tree = await self.find_tree(PATIENCE_S)
        return tree.complete and not tree.processes

    async def find_tree(self, patience_s: float = 0.0, known: ProcessTree | None = None) -> ProcessTree:
        """As :meth:`find_processes`, with what a kill needs to know.

        Args:
            patience_s: How long processes are listed again because some ended before they were looked at.
            known: A tree of this host. If it was listed just now, only newer processes are read.
        """
        if self.absent:
            await trio.lowlevel.checkpoint()
            return ProcessTree((), frozenset(), complete=True, listed_s=time.monotonic())
        if self.mark:
            with user_threads(self.uid, SEARCH) as limiter, trio.move_on_after(MARKS_TIMEOUT_S):
                return await trio.to_thread.run_sync(
                    self.scanner(self.mark, known), patience_s, abandon_on_cancel=True, limiter=limiter
                )
            logger.warning("workload %s: the search for marked processes hangs", self.name)
        return await trio.to_thread.run_sync(self.scanner("", known), patience_s)

    def scanner(self, mark: str, known: ProcessTree | None = None) -> Callable[[float], ProcessTree]:
        """What looks for its processes, for so long, in any thread; with an empty mark it never blocks."""
        worker = identify(os.getpid())
        without = [*self.others(), worker] if worker else list(self.others())
        root, launcher, uid = self.root, self.launcher, self.uid

        def scan(patience_s: float) -> ProcessTree:
            tree = scan_tree(root, mark, without, launcher, patience_s=patience_s, mark_uid=uid, known=known)
            return replace(tree, processes=tuple(each for each in tree.processes if each != worker))

        return scan


def told_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of a program that others started, as many as are worth telling."""
    told: list[str] = []
    room = ARGUMENTS_LIMIT
    for argument in arguments:
        if len(argument) >= room:
            return [*told, f"{argument[: max(0, room - 1)]}…"]
        told.append(argument)
        room -= len(argument) + 1
    return told


def home_of(workload: Workload) -> tuple[str, ...]:
    """GPUs that a workload holds, or was parked from. One that is UNKNOWN may hold others."""
    if workload.home:
        return workload.home
    if workload.lease is not None:
        return workload.lease.gpu_uuids
    return workload.parked.gpu_uuids if workload.parked is not None else ()


def parked_bytes(workload: Workload) -> int:
    """Host memory that a workload takes for what it had on GPUs, as far as NVML could say."""
    if workload.parked is None or workload.state in ENDED:
        return 0
    if workload.parked.host_bytes is not None:
        return workload.parked.host_bytes
    return sum(workload.parked.device_memory_bytes.values())
