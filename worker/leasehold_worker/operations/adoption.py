"""Adoption of running processes as workloads, and their release, unharmed."""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, operation_pb2, workload_pb2

from leasehold_worker.commands.progress import Progress
from leasehold_worker.driver.helper_pool import Driver
from leasehold_worker.driver.members import find_members
from leasehold_worker.errors import OperationError, invalid
from leasehold_worker.files.workload_files import OUTPUT_FILE, require_folder_name
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.hooks.validation import check_hooks
from leasehold_worker.host.accounts import Account
from leasehold_worker.host.process_readings import READING, user_threads
from leasehold_worker.host.process_trees import process_tree
from leasehold_worker.host.processes import (
    ProcessIdentity,
    command_line,
    identify,
    user_id,
    user_ids,
    user_name,
    variable_of,
)
from leasehold_worker.leasing.pool import GpuPool
from leasehold_worker.operations.exit_monitor import ExitMonitor
from leasehold_worker.planning.driver_checks import SUSPEND_CUDA_VERSION, DriverChecks
from leasehold_worker.planning.findings import Findings
from leasehold_worker.programs.run_as import RunAs
from leasehold_worker.workloads.eviction import resolve
from leasehold_worker.workloads.foreign_processes import ForeignWatch, check_living, owner
from leasehold_worker.workloads.probes import probes
from leasehold_worker.workloads.registry import Workloads
from leasehold_worker.workloads.release_rules import check_releasable
from leasehold_worker.workloads.states import ENDED
from leasehold_worker.workloads.workload import ADOPT, WORKLOAD_ID_VARIABLE, Workload, told_arguments

LOOK_TIMEOUT_S: Final = 2.0
"""Time that a complete adoption waits for the list of processes on its GPUs."""

READ_TIMEOUT_S: Final = 5.0
"""Time for reading the processes of an adoption."""

ACTING: Final = frozenset({"command", "http", "vllm", "sglang"})
"""Actions of hooks that run a program, call a server or read a file. A drain of any hook does so too."""

EVERYBODY: Final = "*"
"""Value of the setting that permits processes of any user, but not of root if ``run_as`` is set."""


@final
class Adoption:
    """The operations adopt and release.

    Args:
        driver: Asked whether a process uses CUDA.
        inventory: The GPUs, and the processes on each.
        pool: The pool that leases the GPUs.
        workloads: The registry.
        foreign: Lists the processes on the GPUs before a release.
        exit_monitor: Notices the end of adopted workloads.
        adopt_users: Names or numbers of the users whose processes may be adopted, or EVERYBODY. Empty: the
            worker's own, or all if the worker is root. With ``run_as``, the owner's Unix user is permitted,
            and these are further users.
        run_as: The Unix users of the workloads' owners.
        user: Name of the worker's user.
    """

    def __init__(
        self,
        driver: Driver,
        inventory: Inventory,
        pool: GpuPool,
        workloads: Workloads,
        foreign: ForeignWatch,
        exit_monitor: ExitMonitor,
        adopt_users: Sequence[str],
        run_as: RunAs,
        user: str,
    ) -> None:
        self._driver = driver
        self._inventory = inventory
        self._pool = pool
        self._workloads = workloads
        self._foreign = foreign
        self._exit_monitor = exit_monitor
        self._user = user
        self._adopt_users = adopt_users
        self._run_as = run_as
        self._driver_checks = DriverChecks(driver, inventory)

    async def adopt(
        self,
        workload_id: str,
        operation: operation_pb2.AdoptOperation,
        progress: Progress,
        owner: str = "",
    ) -> None:
        """Registers a process and its descendants as a workload, with a lease of the GPUs that they use.

        The processes are left untouched.

        Raises:
            OperationError: UNKNOWN_PROCESS, ALREADY_REGISTERED, NOT_PERMITTED, NOT_A_CUDA_PROCESS,
                NO_FREE_GPU if one of their GPUs is leased, or the reason why they can't be suspended.
        """
        if workload_id in self._workloads:  # a restart of the worker came between this and its outcome
            progress.already_there = True
            return
        require_folder_name(workload_id)
        found, gpu_uuids, account = await self._examine(operation, owner)
        await self._check_owners(found)
        # No await from here on: nobody can take the GPUs or the process in between.
        lease = self._pool.occupy(workload_id, gpu_uuids)
        spec = workload_pb2.WorkloadSpec(
            arguments=told_arguments(found.arguments),
            resources=workload_pb2.Resources(gpu_count=len(gpu_uuids)),
            hooks=operation.hooks,
            eviction=operation.eviction if operation.HasField("eviction") else None,
        )
        name = operation.name or workload_id
        self._exit_monitor.add(
            Workload(
                workload_id,
                name,
                spec,
                found.root,
                self._workloads.folder(workload_id) / OUTPUT_FILE,
                datetime.now(UTC),
                lease,
                origin=ADOPT,
                user=found.members[0].user,
                uid=found.members[0].uid,
                owner=owner,
                account=account,
                ready_time=None if probes(operation.hooks) else datetime.now(UTC),
            )
        )
        progress.claimed_gpu_uuids = lease.gpu_uuids
        # The adoption is done, and a cancellation during this search must not undo it.
        with trio.move_on_after(LOOK_TIMEOUT_S, shield=True):
            await self._foreign.look(self._workloads)

    async def check(self, operation: operation_pb2.AdoptOperation, owner: str) -> None:
        """Refuses what :meth:`adopt` would refuse now, but for GPUs that are leased. Changes nothing.

        Raises:
            OperationError: As of :meth:`adopt`.
        """
        await self._examine(operation, owner)

    async def _examine(
        self, operation: operation_pb2.AdoptOperation, owner: str
    ) -> "tuple[_Found, Sequence[str], Account | None]":
        """The processes of an adoption, the GPUs that they use, and the Unix user of their hooks."""
        resolve(None, operation.eviction)
        check_hooks(operation.hooks, "operation.hooks")
        found = await _find(operation.pid)
        await self._check_permitted(found, owner)
        await self._check_owners(found)
        account = await self._account(operation, owner, found)
        await self._check_suspendable(found.processes)
        return found, await self._occupied_gpus(operation.pid, found.processes), account

    async def release(self, workload_id: str, progress: Progress) -> None:
        """Releases a workload: its processes keep running without a lease.

        Raises:
            OperationError: WRONG_STATE if Leasehold started the workload, or if the workload is not running:
                a suspended process would never be restored after its release.
        """
        workload = self._workloads.get(workload_id)
        if workload.state in ENDED:
            progress.already_there = True
            return
        check_releasable(workload)
        progress.released_gpu_uuids = workload.gpu_uuids
        await self._exit_monitor.let_go(workload)

    async def _check_permitted(self, found: "_Found", owner: str) -> None:
        """Refuses processes of users that neither the settings nor the owner's mapping permit.

        Raises:
            OperationError: NOT_PERMITTED, or as of :meth:`RunAs.account`.
        """
        others = [
            (member, uid)
            for member in found.members
            for uid, user in member.users.items()
            if not self._may_adopt(uid, user)
        ]
        if not others:
            return
        permitted = ", ".join(self._adopt_users)
        if self._run_as.is_set:
            account = await self._run_as.account(owner)
            own_uid, own = (account.uid, account.name) if account is not None else (os.geteuid(), self._user)
            others = [(member, uid) for member, uid in others if uid != own_uid]
            permitted = f"{own}, the Unix user of {owner}" + (f", and of {permitted}" if permitted else "")
        if others:
            member, uid = others[0]
            pid, user = member.identity.pid, member.users[uid]
            verb = "runs" if uid == member.uid else "can run"  # by its real or saved user
            raise OperationError(
                errors_pb2.ERROR_REASON_NOT_PERMITTED,
                f"process {pid} {verb} as {user}, and only processes of {permitted or self._user} may be "
                f"adopted: name {user} in adopt_users of the worker's settings, or adopt another process",
                {"pid": str(pid)},
            )

    def _may_adopt(self, uid: int, user: str) -> bool:
        """Whether the settings permit processes of a user, whoever adopts."""
        if {str(uid), user} & set(self._adopt_users):
            return True
        if self._run_as.is_set:
            return EVERYBODY in self._adopt_users and uid != 0
        return EVERYBODY in self._adopt_users if self._adopt_users else os.geteuid() in (0, uid)

    async def _account(
        self, operation: operation_pb2.AdoptOperation, owner: str, found: "_Found"
    ) -> Account | None:
        """The Unix user that hooks run as. None: the worker's own, or there are no such hooks.

        Raises:
            OperationError: As of :meth:`RunAs.account`. NOT_PERMITTED also if a hook would act for the owner
                as another user than the owner's.
        """
        if not any(hook.WhichOneof("action") in ACTING or hook.HasField("drain") for hook in operation.hooks):
            return None
        account = await self._run_as.account(owner)
        if not self._run_as.is_set:
            return None
        uid = account.uid if account is not None else os.geteuid()
        for member in found.members:
            if set(member.users) != {uid}:
                raise OperationError(
                    errors_pb2.ERROR_REASON_NOT_PERMITTED,
                    f"process {member.identity.pid} runs as {member.user}, and the worker's run_as maps "
                    f"{owner} to another user: adopt it without hooks that run programs, call servers or "
                    "drain",
                    {"pid": str(member.identity.pid)},
                )
        return account

    async def _check_owners(self, found: "_Found") -> None:
        """Refuses processes that belong to a workload. Afterwards none does until the next checkpoint."""
        await check_living(self._workloads, found.root.pid, partial(_check_unowned, found.members))

    async def _check_suspendable(self, processes: Sequence[ProcessIdentity]) -> None:
        findings = Findings()
        self._driver_checks.driver(findings, SUSPEND_CUDA_VERSION)
        if await self._driver_checks.runnable(findings, processes) and not findings.refusals:
            members = await find_members(self._driver, processes)
            if not members:
                raise _no_cuda(processes[0].pid)
            await self._driver_checks.members(findings, members)
        if findings.refusals:
            raise findings.refusals[0]

    async def _occupied_gpus(self, pid: int, processes: Sequence[ProcessIdentity]) -> list[str]:
        pids = {identity.pid for identity in processes}
        usage = await trio.to_thread.run_sync(self._inventory.usage, abandon_on_cancel=True)
        occupied = {uuid for uuid, gpu in usage.items() if pids & gpu.processes.keys()}
        found = [gpu.uuid for gpu in self._pool.slots.gpus if gpu.uuid in occupied]
        if not found:
            raise _no_cuda(pid)
        findings = Findings()
        await self._driver_checks.mig(findings, found)
        if findings.refusals:
            raise findings.refusals[0]
        return found


@dataclass(frozen=True, slots=True)
class _Member:
    """A process that may be adopted.

    Attributes:
        identity: The process.
        users: Names of users by id, as of :func:`user_ids`: first the effective user. Empty: it is gone.
        marked_id: The workload that its environment names.
    """

    identity: ProcessIdentity
    users: Mapping[int, str]
    marked_id: str

    @property
    def uid(self) -> int | None:
        """The effective user id. None: it is gone."""
        return next(iter(self.users), None)

    @property
    def user(self) -> str:
        """Its name. Empty: it is gone."""
        return next(iter(self.users.values()), "")


@dataclass(frozen=True, slots=True)
class _Found:
    """A process that may be adopted, with its descendants.

    Attributes:
        root: The process.
        arguments: Its command line.
        members: The process and its descendants.
    """

    root: ProcessIdentity
    arguments: list[str]
    members: tuple[_Member, ...]

    @property
    def processes(self) -> list[ProcessIdentity]:
        """The process and its descendants."""
        return [member.identity for member in self.members]


def _check_unowned(members: Iterable[_Member], workloads: Collection[Workload]) -> None:
    for member in members:
        holder = owner(member.identity.pid, workloads, member.marked_id)
        if holder is not None:
            raise OperationError(
                errors_pb2.ERROR_REASON_ALREADY_REGISTERED,
                f"process {member.identity.pid} already belongs to workload {holder.name}: use that",
                {"pid": str(member.identity.pid)},
            )


async def _find(pid: int) -> _Found:
    """Reads the process and its descendants, in a thread that is abandoned if it hangs."""
    if pid < 1:
        raise invalid("pid", f"invalid process id {pid}: give the id of a running process")
    with user_threads(user_id(pid), READING) as limiter, trio.move_on_after(READ_TIMEOUT_S):
        return await trio.to_thread.run_sync(_read, pid, abandon_on_cancel=True, limiter=limiter)
    raise OperationError(
        errors_pb2.ERROR_REASON_TARGET_NOT_RUNNABLE,
        f"process {pid} or a descendant can't be read within {READ_TIMEOUT_S:g} s, since a "
        "process is stuck in the kernel or the host's directory of users does not answer: "
        "try again",
        {"pid": str(pid)},
    )


def _read(pid: int) -> _Found:
    root = identify(pid)
    if root is None:
        raise _unknown(pid, "it has ended, or is a thread or a zombie")
    arguments = [] if pid in (1, os.getpid(), os.getppid()) else command_line(pid)
    if not arguments:
        raise _unknown(pid, "it belongs to the system or the worker")
    processes = process_tree(root)
    if os.getpid() in {identity.pid for identity in processes}:
        raise _unknown(pid, "the worker itself is among its descendants")
    members = [_member(root), *(_member(identity) for identity in processes if identity != root)]
    return _Found(root, arguments, tuple(members))


def _member(identity: ProcessIdentity) -> _Member:
    users = {uid: user_name(uid) for uid in user_ids(identity.pid)}
    return _Member(identity, users, variable_of(identity.pid, WORKLOAD_ID_VARIABLE))


def _unknown(pid: int, why: str) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_UNKNOWN_PROCESS,
        f"process {pid} can't be adopted: {why}; `nvidia-smi` lists those that use GPUs",
        {"pid": str(pid)},
    )


def _no_cuda(pid: int) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_NOT_A_CUDA_PROCESS,
        f"neither process {pid} nor one of its descendants uses a GPU: wait until it does, or adopt another",
        {"pid": str(pid)},
    )
