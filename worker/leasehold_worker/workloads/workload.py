"""One workload: its facts, its state, and its processes."""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final

import trio
from leasehold.v1 import errors_pb2, eviction_pb2, workload_pb2
from leasehold.v1.workload_pb2 import WorkloadOrigin, WorkloadSpec, WorkloadState

from leasehold_worker.driver.members import Member
from leasehold_worker.errors import OperationError
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.fork_chains import is_related
from leasehold_worker.host.process_readings import SEARCH, user_threads
from leasehold_worker.host.process_trees import ProcessTree, scan_tree
from leasehold_worker.host.processes import ProcessIdentity, identify
from leasehold_worker.leasing.host_reservations import HostReservation
from leasehold_worker.leasing.leases import Lease
from leasehold_worker.threads import run_in_thread
from leasehold_worker.workloads.probes import probes
from leasehold_worker.workloads.states import ENDED, RUNNING

logger = logging.getLogger(__name__)


KEEP_RUNNING: Final = eviction_pb2.PROCESS_STRATEGY_KEEP_RUNNING


PATIENCE_S: Final = 0.2
"""How long incomplete listings of processes are repeated if no process may be missed."""

MARKS_TIMEOUT_S: Final = 2.0
"""Time for the search for marked processes, which a process stuck in the kernel can block."""

RUN: Final = workload_pb2.WORKLOAD_ORIGIN_RUN
EXEC: Final = workload_pb2.WORKLOAD_ORIGIN_EXEC
CLAIM: Final = workload_pb2.WORKLOAD_ORIGIN_CLAIM
ADOPT: Final = workload_pb2.WORKLOAD_ORIGIN_ADOPT
LET_GO: Final = frozenset({CLAIM, ADOPT})
"""Origins of workloads of which remaining processes that are not suspended outlive the first one."""

WORKLOAD_ID_VARIABLE: Final = "LEASEHOLD_WORKLOAD_ID"
ARGUMENTS_LIMIT: Final = 4096
"""Characters of the arguments of adopted programs, which are only reported."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The record that a restore of a workload needs.

    Attributes:
        gpu_uuids: GPUs before the suspend, in the workload's order.
        device_memory_bytes: Device memory that it needs again, by former GPU; missing if unknown to NVML.
        policy: Policy of the suspend.
        since: Time of the suspend.
        host_bytes: Part of the device memory that is in host memory. None: all.
        checkpoint_id: Checkpoint of the restore. Empty: its processes, or nothing.
        disk_bytes: Bytes of its checkpoint on disk.
    """

    gpu_uuids: tuple[str, ...]
    device_memory_bytes: Mapping[str, int]
    policy: eviction_pb2.EvictionPolicy
    since: datetime
    host_bytes: int | None = None
    checkpoint_id: str = ""
    disk_bytes: int = 0

    def by(self, process_strategy: eviction_pb2.ProcessStrategy.ValueType) -> "Parked":
        """The record of a workload that is suspended by another process strategy than intended."""
        policy = eviction_pb2.EvictionPolicy()
        policy.CopyFrom(self.policy)
        policy.process_strategy = process_strategy
        return replace(self, policy=policy)


@dataclass(frozen=True, slots=True)
class Hooked:
    """A suspend by hooks that no restore has undone.

    Attributes:
        policy: Policy of the hooks' calls.
        notes: Progress of the hooks.
    """

    policy: eviction_pb2.EvictionPolicy
    notes: tuple[str, ...]


@dataclass(eq=False, slots=True)
class Workload:
    """A process tree of this worker. It ends with its first process.

    Only this package writes the attributes. :class:`Workloads` changes the state and reports each change. The
    methods here record facts that are reported with the next change.
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
    """GPUs from which its members are displaced, while it is UNKNOWN and may hold others."""
    parked: Parked | None = None
    end_time: datetime | None = None
    returncode: int | None = None
    error: OperationError | None = None
    headless: bool = False
    """The first process has ended; others may be left."""
    ended: trio.Event = field(default_factory=trio.Event)
    restored: bool = False
    """Whether members were restored: killing them while they run could hang the host."""
    ending: trio.Lock = field(default_factory=trio.Lock)
    """Held during a kill of its processes."""
    origin: WorkloadOrigin.ValueType = RUN
    user: str = ""
    """Name of the user of its first process, for display."""
    uid: int | None = None
    """Id of that user. Users are compared by their ids, and no user has the id None."""
    owner: str = ""
    """Identity that created it, as the coordinator named it. Empty: created on this host, or unknown."""
    account: Account | None = None
    """The Unix user that its program runs as. None: the worker's own, or the worker did not start it."""
    host: HostReservation | None = None
    """Its host resources other than GPUs, until it has ended."""
    mark: str = ""
    """Environment variable that marks the processes of its user. Empty: none."""
    launcher: ProcessIdentity | None = None
    """The parent of its first process, which gets its orphans. None: not a process of the worker."""
    absent: bool = False
    """The workload is suspended without processes: its first pid may belong to another process now."""
    hooked: Hooked | None = None
    """The hooks that a restore has to undo. None: there are none."""
    kernel: workload_pb2.Kernel | None = None
    """Its checkpointable application."""
    yielded: bool = False
    """The workload was preempted, and is restored once GPUs are free."""
    ready_time: datetime | None = None
    """Time at which the program became ready. None: it is not ready."""
    lost_gpu_uuids: tuple[str, ...] = ()
    """The GPUs of its lease that a start of the worker could not lease again."""
    begun_s: float = field(default_factory=time.monotonic)
    """Time at which the wait for readiness began, of the monotonic clock."""
    unready: str = ""
    """The last error of the readiness probe."""
    others: Callable[[], Collection[ProcessIdentity]] = field(default=tuple, repr=False)
    """The first processes of the other living workloads; set by the registry."""

    @property
    def gpu_uuids(self) -> tuple[str, ...]:
        """The GPUs that it leases."""
        return self.lease.gpu_uuids if self.lease is not None else ()

    @property
    def is_asleep(self) -> bool:
        """Whether its processes run, while it is suspended and holds no GPU."""
        return self.parked is not None and self.parked.policy.process_strategy == KEEP_RUNNING

    @property
    def is_half_awake(self) -> bool:
        """Whether its restore is incomplete: it runs, but some hooks have failed."""
        return self.state == RUNNING and self.hooked is not None

    @property
    def has_probe(self) -> bool:
        """Whether its spec names a readiness probe."""
        return bool(probes(self.spec.hooks))

    @property
    def awaits_readiness(self) -> bool:
        """Whether the workload runs and is not ready."""
        return self.state == RUNNING and self.ready_time is None

    @property
    def trouble(self) -> OperationError | None:
        """The workload's current problem. None: there is none."""
        if self.is_half_awake:
            return OperationError(
                errors_pb2.ERROR_REASON_HOOK_FAILED,
                f"workload {self.name} runs, but some of its hooks failed: the worker retries them for some "
                "minutes, and `leasehold wake` retries them at any time",
            )
        if self.error is not None or self.state in ENDED:
            return self.error
        if self.lost_gpu_uuids:
            return OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_GPU,
                f"workload {self.name} has lost its lease of {', '.join(self.lost_gpu_uuids)}, which the "
                "worker did not find at a start: stop the workload, and run it again",
                {"gpu_uuid": self.lost_gpu_uuids[0]},
            )
        if self.parked is not None and self.parked.checkpoint_id and not self.parked.disk_bytes:
            return OperationError(
                errors_pb2.ERROR_REASON_UNKNOWN_CHECKPOINT,
                f"checkpoint {self.parked.checkpoint_id} of workload {self.name} was deleted: stop the "
                "workload, or restore it from another checkpoint",
                {"checkpoint_id": self.parked.checkpoint_id},
            )
        return None

    def hold(self, lease: Lease | None) -> None:
        """Records the lease of the workload's current GPUs."""
        self.lease = lease
        if lease is not None:
            self.lost_gpu_uuids = ()

    def lose_gpus(self, gpu_uuids: tuple[str, ...]) -> None:
        """Records GPUs of its lease that could not be leased again."""
        self.lost_gpu_uuids = gpu_uuids

    def hold_host(self, host: HostReservation | None) -> None:
        """Records the reservation of the workload's host resources."""
        self.host = host

    def begin(self, root: ProcessIdentity, launcher: ProcessIdentity | None) -> None:
        """Records that the workload has processes again, below a new first process."""
        self.root, self.launcher = root, launcher
        self.absent = False

    def note_members(self, members: tuple[Member, ...]) -> None:
        """Records the members."""
        self.members = members

    def note_hooks(self, hooked: Hooked | None) -> None:
        """Records the hooks that a restore has to undo."""
        self.hooked = hooked

    def note_yield(self, *, yielded: bool) -> None:
        """Records whether the workload is restored by the worker once GPUs are free."""
        self.yielded = yielded

    def note_exit(self, returncode: int | None, orphan_mark: str) -> None:
        """Records the end of the first process. Others may be left.

        Args:
            returncode: Its exit status. None: unknown.
            orphan_mark: Environment variables that mark orphans without a launcher. Empty: there are none.
        """
        self.returncode = returncode
        self.headless = True
        self.mark = self.mark or orphan_mark

    def mark_restored(self) -> None:
        """Records that members were restored, perhaps only some of them."""
        self.restored = True

    def take_back(self) -> None:
        """Records that the journal had lost the workload, and that members may have been restored."""
        self.mark_restored()
        self.generation = generation_after_start(0)

    async def find_processes(self) -> list[ProcessIdentity]:
        """The living processes of the workload, by start time.

        The worker and other workloads are left out with their descendants, though they may descend from its
        first process or have inherited its mark. If the search for marked processes hangs, processes that are
        only marked are left out.
        """
        return list((await self.find_tree()).processes)

    async def is_gone(self) -> bool:
        """Whether no process of the workload is left, and none can have been missed."""
        tree = await self.find_tree(PATIENCE_S)
        return tree.complete and not tree.processes

    async def find_tree(self, patience_s: float = 0.0, known: ProcessTree | None = None) -> ProcessTree:
        """As :meth:`find_processes`, with the facts that a kill needs.

        Args:
            patience_s: Time for which processes are listed again if some ended before they were read.
            known: A tree of this host. If it was listed just now, only newer processes are read.
        """
        if self.absent:
            await trio.lowlevel.checkpoint()
            return ProcessTree((), frozenset(), complete=True, listed_s=time.monotonic())
        if self.mark:
            with user_threads(self.uid, SEARCH) as limiter, trio.move_on_after(MARKS_TIMEOUT_S):
                return await run_in_thread(
                    self.scanner(self.mark, known), patience_s, abandon_on_cancel=True, limiter=limiter
                )
            logger.warning("workload %s: the search for marked processes hangs", self.name)
        return await run_in_thread(self.scanner("", known), patience_s)

    def scanner(self, mark: str, known: ProcessTree | None = None) -> Callable[[float], ProcessTree]:
        """A scanner of the workload's processes, for any thread; with an empty mark it never blocks."""
        worker = identify(os.getpid())
        without = self._strangers()
        root, launcher, uid = self.root, self.launcher, self.uid

        def scan(patience_s: float) -> ProcessTree:
            tree = scan_tree(root, mark, without, launcher, patience_s=patience_s, mark_uid=uid, known=known)
            return replace(tree, processes=tuple(each for each in tree.processes if each != worker))

        return scan

    def membership(self, mark: str) -> Callable[[ProcessIdentity], bool]:
        """Whether one process belongs to the workload, for any thread; with an empty mark it never blocks.

        The answer is quick, and is no for some orphans that a scan finds.
        """
        strangers = self._strangers()
        launcher, uid = self.launcher, self.uid
        relatives = [self.root] if launcher is None else [self.root, launcher]

        def is_member(identity: ProcessIdentity) -> bool:
            return identity != launcher and is_related(identity, relatives, strangers, mark, uid)

        return is_member

    def _strangers(self) -> list[ProcessIdentity]:
        """The worker and the first processes of other workloads."""
        worker = identify(os.getpid())
        return [*self.others(), worker] if worker else list(self.others())


def generation_after_start(last: int) -> int:
    """The generation of a workload that a start of the worker finds.

    The coordinator ignores a generation that is not above the last one, and the journal may be an old copy,
    or lost. The milliseconds of the clock are above all earlier generations, unless the clock was wrong: a
    workload changes less often.

    Args:
        last: The last known generation. 0: none is known.
    """
    return max(last + 1, time.time_ns() // 10**6)


def told_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of an adopted program, cut to the reported length."""
    told: list[str] = []
    room = ARGUMENTS_LIMIT
    for argument in arguments:
        if len(argument) >= room:
            return [*told, f"{argument[: max(0, room - 1)]}…"]
        told.append(argument)
        room -= len(argument) + 1
    return told


def home_of(workload: Workload) -> tuple[str, ...]:
    """GPUs that a workload holds, or held before its suspend. An UNKNOWN one may hold others."""
    if workload.home:
        return workload.home
    if workload.lease is not None:
        return workload.lease.gpu_uuids
    return workload.parked.gpu_uuids if workload.parked is not None else ()


def parked_bytes(workload: Workload) -> int:
    """Host memory that holds a workload's former device memory. Unknown sizes count as 0."""
    if workload.parked is None or workload.state in ENDED:
        return 0
    if workload.parked.host_bytes is not None:
        return workload.parked.host_bytes
    return sum(workload.parked.device_memory_bytes.values())
