"""Many members, all or nothing.

A process moves along one line of states, RUNNING, LOCKED, CHECKPOINTED, one driver call per step. A group
takes each step with all its members before the next: lock all, checkpoint all; restore all, unlock all.
When a member fails, every member goes back along the line to where it was, past further failures, and only
what the driver itself leaves nowhere to go is named WEDGED or UNKNOWN.

Members are called in parallel, because a call on one NCCL rank blocks while another is locked
(NVIDIA/cuda-checkpoint issue 30), or one after the other where they share memory by CUDA IPC.
"""

import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import MemberState

from leasehold_worker.checkpoint.driver import Driver, DriverCallTimeoutError, DriverUnavailableError
from leasehold_worker.checkpoint.driver_errors import (
    NOT_CUDA,
    OUT_OF_MEMORY,
    DriverError,
)
from leasehold_worker.checkpoint.gpu_pairs import GpuPair, rebase_pairs
from leasehold_worker.checkpoint.helper_protocol import DriverCall
from leasehold_worker.checkpoint.process import (
    CheckpointOptions,
    CheckpointProcess,
    LockOptions,
    ProcessState,
    RestoreOptions,
)
from leasehold_worker.errors import OperationError
from leasehold_worker.processes import ProcessIdentity, has_ended, held, is_alive

RUNNING: Final = workload_pb2.MEMBER_STATE_RUNNING
LOCKED: Final = workload_pb2.MEMBER_STATE_LOCKED
CHECKPOINTED: Final = workload_pb2.MEMBER_STATE_CHECKPOINTED
WEDGED: Final = workload_pb2.MEMBER_STATE_WEDGED
UNKNOWN: Final = workload_pb2.MEMBER_STATE_UNKNOWN
GONE: Final = workload_pb2.MEMBER_STATE_GONE

_LINE: Final = (RUNNING, LOCKED, CHECKPOINTED)
_DOWN: Final = {RUNNING: DriverCall.LOCK, LOCKED: DriverCall.CHECKPOINT}
_UP: Final = {CHECKPOINTED: DriverCall.RESTORE, LOCKED: DriverCall.UNLOCK}

_MEMBER_STATES: Final = {
    ProcessState.RUNNING: RUNNING,
    ProcessState.LOCKED: LOCKED,
    ProcessState.CHECKPOINTED: CHECKPOINTED,
    ProcessState.FAILED: workload_pb2.MEMBER_STATE_FAILED,
    ProcessState.CHECKPOINTING: workload_pb2.MEMBER_STATE_CHECKPOINTING,
    ProcessState.RESTORING: workload_pb2.MEMBER_STATE_RESTORING,
    ProcessState.UNKNOWN: UNKNOWN,
}


def next_call(state: MemberState.ValueType, target: MemberState.ValueType) -> DriverCall | None:
    """The call that takes a member one step towards a state on the line.

    None: it is there, or stands somewhere that no call leads away from.
    """
    if state not in _LINE or state == target:
        return None
    return _DOWN.get(state) if _LINE.index(state) < _LINE.index(target) else _UP.get(state)


def transfer_timeout_s(moved_bytes: int) -> float:
    """Deadline of a checkpoint or restore: three times the planned time, and 30 s.

    Planned are 0.5 s and 2 GB/s, the slowest that was measured; the driver offers no way to go faster.
    """
    return 3 * (0.5 + moved_bytes / 2e9) + 30


@dataclass(frozen=True, slots=True)
class Member:
    """One CUDA process of a workload.

    Attributes:
        identity: The process.
        state: What the driver said, or what we know better (WEDGED, UNKNOWN, GONE).
        device_memory_bytes: Device memory in use by GPU UUID; a GPU is missing where NVML couldn't say.
        displacement: Complete pairs from the GPUs where its workload is parked to those where the driver
            has its content, after a restore elsewhere that had to be undone. Empty: it is where it should be.
    """

    identity: ProcessIdentity
    state: MemberState.ValueType
    device_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    displacement: tuple[GpuPair, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Device memory on all GPUs."""
        return sum(self.device_memory_bytes.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """One driver call on one member: what, how long, and the bytes that it moved, if it moves any."""

    call: DriverCall
    duration_s: float
    moved_bytes: int | None


@dataclass(slots=True)
class MemberOutcome:
    """What an operation did with one member. ``rolled_back`` is None where no rollback was needed."""

    member: Member
    state_before: MemberState.ValueType
    state_after: MemberState.ValueType
    phases: list[Phase] = field(default_factory=list)
    error: OperationError | None = None
    rolled_back: bool | None = None
    displacement: tuple[GpuPair, ...] = ()

    def member_after(self) -> Member:
        """The member as the operation left it."""
        return replace(self.member, state=self.state_after, displacement=self.displacement)


async def find_members(driver: Driver, processes: Sequence[ProcessIdentity]) -> tuple[Member, ...]:
    """Those of the processes that use CUDA, with their state.

    Asked by restore-thread id: get-state also answers for launchers that share /proc with a job.

    Raises:
        OperationError: The driver can't be asked.
    """
    found: dict[ProcessIdentity, Member] = {}
    errors: list[OperationError] = []

    async def probe(identity: ProcessIdentity) -> None:
        process = CheckpointProcess(driver, identity.pid)
        try:
            await process.restore_thread_id()
            found[identity] = Member(identity, _MEMBER_STATES[await process.state()])
        except DriverError as error:
            if error.result not in NOT_CUDA:
                errors.append(error.to_operation_error(observed_state="unknown", alive=is_alive(identity)))
        except DriverCallTimeoutError as error:
            errors.append(_timeout_error(str(error), identity.pid, DriverCall.STATE))
        except DriverUnavailableError as error:
            errors.append(
                OperationError(
                    errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER, f"there is no usable CUDA driver: {error}"
                )
            )

    async with trio.open_nursery() as nursery:
        for identity in processes:
            nursery.start_soon(probe, identity)
    if errors:
        raise errors[0]
    return tuple(found[identity] for identity in processes if identity in found)


@final
class Group:
    """The members of one operation, in the order in which they are called.

    It may suspend and then restore them, as a remap does; ``outcomes`` tell the whole of it.
    """

    def __init__(
        self,
        driver: Driver,
        members: Sequence[Member],
        *,
        sequential: bool,
        on_phase: Callable[[str], None],
    ) -> None:
        self._driver = driver
        self._sequential = sequential
        self._on_phase = on_phase
        self.outcomes = [
            MemberOutcome(member, member.state, member.state, displacement=member.displacement)
            for member in members
        ]
        self._states_at_begin: dict[ProcessIdentity, MemberState.ValueType] = {}

    async def suspend(self, lock_timeout_s: float, rescan: Callable[[], Awaitable[Sequence[Member]]]) -> None:
        """Locks and checkpoints every member, or brings all back to where they were.

        It is finished before a cancellation is delivered. Members that are there already stay there.

        Args:
            lock_timeout_s: How long submitted work may take to drain.
            rescan: Finds the workload's members again once all are locked.

        Raises:
            OperationError: The first thing that went wrong; ``outcomes`` say the rest.
        """
        with trio.CancelScope(shield=True):
            await self._guarded(functools.partial(self._suspend, lock_timeout_s, rescan))

    async def restore(self, gpu_pairs: tuple[GpuPair, ...]) -> None:
        """Restores and unlocks every member on the GPUs of the pairs, or brings all back to CHECKPOINTED.

        It is finished before a cancellation is delivered.

        Raises:
            OperationError: The first thing that went wrong; ``outcomes`` say the rest.
        """
        with trio.CancelScope(shield=True):
            await self._guarded(functools.partial(self._restore, gpu_pairs))

    async def roll_back(self) -> None:
        """Brings every member back to where it was when the last operation began, past failures."""
        self._on_phase("rollback")
        with trio.CancelScope(shield=True):
            await self._for_each(self._bring_back, list(reversed(self.outcomes)))

    async def _guarded(self, operation: Callable[[], Awaitable[None]]) -> None:
        self._states_at_begin = {o.member.identity: o.state_after for o in self.outcomes}
        for outcome in self.outcomes:
            outcome.rolled_back = None
        try:
            await operation()
        except OperationError:
            await self.roll_back()
            raise

    async def _suspend(
        self, lock_timeout_s: float, rescan: Callable[[], Awaitable[Sequence[Member]]]
    ) -> None:
        await self._step(DriverCall.LOCK, RUNNING, LOCKED, lock_timeout_s=lock_timeout_s)
        known = {outcome.member.identity for outcome in self.outcomes}
        newcomers = [member for member in await rescan() if member.identity not in known]
        if newcomers:
            raise OperationError(
                errors_pb2.ERROR_REASON_MEMBERS_CHANGED,
                f"process {newcomers[0].identity.pid} began to use CUDA while the workload was being locked: "
                "try again",
                {"pid": str(newcomers[0].identity.pid)},
            )
        await self._step(DriverCall.CHECKPOINT, LOCKED, CHECKPOINTED)

    async def _restore(self, gpu_pairs: tuple[GpuPair, ...]) -> None:
        await self._step(DriverCall.RESTORE, CHECKPOINTED, LOCKED, gpu_pairs=gpu_pairs)
        await self._step(DriverCall.UNLOCK, LOCKED, RUNNING)

    async def _step(
        self,
        call: DriverCall,
        source: MemberState.ValueType,
        destination: MemberState.ValueType,
        *,
        lock_timeout_s: float | None = None,
        gpu_pairs: tuple[GpuPair, ...] = (),
    ) -> None:
        self._on_phase(str(call))

        failures: list[OperationError] = []

        async def take(outcome: MemberOutcome) -> None:
            if failures and self._sequential:
                return
            try:
                await self._take_step(outcome, call, destination, lock_timeout_s, gpu_pairs)
            except OperationError as error:
                outcome.error = outcome.error or error
                failures.append(error)

        await self._for_each(take, [outcome for outcome in self.outcomes if outcome.state_after == source])
        if failures:
            raise failures[0]

    async def _for_each(
        self, act: Callable[[MemberOutcome], Awaitable[None]], outcomes: list[MemberOutcome]
    ) -> None:
        if self._sequential:
            for outcome in outcomes:
                await act(outcome)
        else:
            async with trio.open_nursery() as nursery:
                for outcome in outcomes:
                    nursery.start_soon(act, outcome)

    async def _take_step(
        self,
        outcome: MemberOutcome,
        call: DriverCall,
        destination: MemberState.ValueType,
        lock_timeout_s: float | None,
        gpu_pairs: tuple[GpuPair, ...],
    ) -> None:
        """Makes the call and reads the state afterwards: the driver is trusted over our own record."""
        identity = outcome.member.identity
        process = CheckpointProcess(self._driver, identity.pid)
        with held(identity) as pidfd:
            if pidfd is None:
                outcome.state_after = GONE
                raise OperationError(
                    errors_pb2.ERROR_REASON_TARGET_CRASHED,
                    f"process {identity.pid} has ended",
                    {"pid": str(identity.pid), "phase": str(call)},
                )
            started = time.monotonic()
            try:
                await self._make_call(process, outcome, call, lock_timeout_s, gpu_pairs)
                outcome.state_after = _MEMBER_STATES[await process.state()]
            except DriverError as error:
                await self._observe(process, outcome, pidfd)
                if call is DriverCall.RESTORE and error.result == OUT_OF_MEMORY:
                    outcome.state_after = WEDGED
                raise error.to_operation_error(
                    observed_state=MemberState.Name(outcome.state_after), alive=outcome.state_after != GONE
                ) from error
            except (DriverCallTimeoutError, DriverUnavailableError) as error:
                outcome.state_after = UNKNOWN
                raise _timeout_error(str(error), identity.pid, call) from error
            moved = (
                outcome.member.total_bytes if call in (DriverCall.CHECKPOINT, DriverCall.RESTORE) else None
            )
            outcome.phases.append(Phase(call, time.monotonic() - started, moved))
        if outcome.state_after != destination:
            raise OperationError(
                errors_pb2.ERROR_REASON_DRIVER_ERROR,
                f"{call} of process {identity.pid} succeeded, but its state is "
                f"{MemberState.Name(outcome.state_after)}",
                {"pid": str(identity.pid), "phase": str(call)},
            )

    async def _make_call(
        self,
        process: CheckpointProcess,
        outcome: MemberOutcome,
        call: DriverCall,
        lock_timeout_s: float | None,
        gpu_pairs: tuple[GpuPair, ...],
    ) -> None:
        transfer_s = transfer_timeout_s(outcome.member.total_bytes)
        match call:
            case DriverCall.LOCK:
                await process.lock(LockOptions(lock_timeout_s) if lock_timeout_s else None)
            case DriverCall.CHECKPOINT:
                await process.checkpoint_with_options(CheckpointOptions(transfer_s))
            case DriverCall.RESTORE:
                pairs = rebase_pairs(gpu_pairs, outcome.displacement)
                await process.restore_with_options(RestoreOptions(pairs, transfer_s))
                outcome.displacement = gpu_pairs
            case DriverCall.UNLOCK:
                await process.unlock()
            case DriverCall.STATE | DriverCall.RESTORE_THREAD_ID:
                raise ValueError(f"{call} is not a step")

    async def _observe(self, process: CheckpointProcess, outcome: MemberOutcome, pidfd: int) -> None:
        """Reads the member's state after something went wrong."""
        if has_ended(pidfd):
            outcome.state_after = GONE
            return
        try:
            outcome.state_after = _MEMBER_STATES[await process.state()]
        except (DriverError, DriverCallTimeoutError, DriverUnavailableError):
            outcome.state_after = GONE if has_ended(pidfd) else UNKNOWN

    async def _bring_back(self, outcome: MemberOutcome) -> None:
        target = self._states_at_begin[outcome.member.identity]
        if outcome.state_after == target:
            return
        while call := next_call(outcome.state_after, target):
            step = 1 if call in _DOWN.values() else -1
            destination = _LINE[_LINE.index(outcome.state_after) + step]
            try:
                await self._take_step(outcome, call, destination, None, ())
            except OperationError as error:
                outcome.error = outcome.error or error
                break
        outcome.rolled_back = outcome.state_after == target


def _timeout_error(message: str, pid: int, call: DriverCall) -> OperationError:
    return OperationError(
        errors_pb2.ERROR_REASON_DRIVER_TIMEOUT,
        f"{message}; its state is not known, and it is left alone",
        {"pid": str(pid), "phase": str(call)},
    )
