"""One CUDA process under the driver's checkpoint API, for trio."""

import enum
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self

import trio

from leasehold_worker.driver.errors import ILLEGAL_STATE, NOT_READY, SUCCESS, DriverError
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.helper_pool import (
    Driver,
    DriverCallUnansweredError,
    DriverUnavailableError,
    Request,
)
from leasehold_worker.driver.helper_protocol import DriverCall, Reply

DEFAULT_LOCK_TIMEOUT_S: Final = 10.0
"""The driver's own default is to wait forever."""

TRANSFER_TIMEOUT_S: Final = 600.0
"""Time of a checkpoint or restore call beyond the driver's floor, by default."""

POLL_INTERVAL_S: Final = 0.025


class ProcessState(enum.IntEnum):
    """The driver's state of a process (CUprocessState).

    A number that a newer driver answers is kept as it is: ``ProcessState(9)`` has the value 9 and the name
    "STATE_9".
    """

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3
    CHECKPOINTING = 4
    RESTORING = 5

    @classmethod
    def _missing_(cls, value: object) -> "ProcessState | None":
        if not isinstance(value, int) or value < 0:
            return None
        state = int.__new__(cls, value)
        state._name_, state._value_ = f"STATE_{value}", value
        return state


class LockResult(enum.Enum):
    """The result of a lock with a timeout."""

    LOCKED = enum.auto()
    TIMED_OUT = enum.auto()


def lock_timeout_ms(timeout_s: float) -> int:
    """A lock's timeout in the driver's unit, rounded up: never 0, which would mean "wait forever".

    Raises:
        ValueError: The timeout is not finite, not greater than 0, or too long for the driver.
    """
    if not 0 < timeout_s < 2**32 / 1000 - 1:
        raise ValueError(f"invalid lock timeout {timeout_s} s: give more than 0, at most 49 days")
    return math.ceil(timeout_s * 1000)


class WaitTimeoutError(Exception):
    """The process did not reach the expected state in time."""


class LeftLockedError(Exception):
    """The process was locked, and could not be unlocked. The cause is the earlier error."""


CALL_ERRORS: Final = (DriverError, DriverCallUnansweredError, DriverUnavailableError)
"""The exceptions of driver calls."""


@dataclass(frozen=True, slots=True)
class CheckpointProcess:
    """A CUDA process that the driver can lock, checkpoint, restore and unlock.

    Two objects with the same pid are equal. With the start time, no call reaches a later process with the
    same pid: the helper compares it right before the call, and the answer is that for a missing process,
    OPERATING_SYSTEM.

    Every call raises :class:`DriverError` for an error of the driver, ``DriverUnavailableError`` without a
    driver, and ``DriverCallUnansweredError`` if the driver doesn't answer. A running call is finished before
    a cancellation is delivered.
    """

    driver: Driver = field(compare=False, repr=False)
    pid: int
    start_time_ticks: int = field(default=0, compare=False)

    @classmethod
    def from_pid(cls, driver: Driver, pid: int) -> Self:
        """The process with this pid."""
        return cls(driver, pid)

    @classmethod
    def current(cls, driver: Driver) -> Self:
        """The calling process. It must not lock itself: it would wait for its own helper forever."""
        return cls(driver, os.getpid())

    def _request(
        self, call: DriverCall, *, lock_timeout_ms: int = 0, gpu_pairs: Sequence[tuple[str, str]] = ()
    ) -> Request:
        return Request(call, self.pid, lock_timeout_ms, list(gpu_pairs), self.start_time_ticks)

    async def _call(self, call: DriverCall, extra_s: float = 0.0) -> Reply:
        return self._checked(call, await self.driver.call(self._request(call), extra_s))

    def _checked(self, call: DriverCall, reply: Reply) -> Reply:
        if reply.result != SUCCESS:
            raise DriverError(
                call, self.pid, reply.result, reply.result_name, ended=reply.ended, obstacle=reply.obstacle
            )
        return reply

    async def state(self) -> ProcessState:
        """The state that the driver reports."""
        value = (await self._call(DriverCall.STATE)).value
        if value is None:
            raise DriverError(DriverCall.STATE, self.pid, None, "no state")
        return ProcessState(value)

    async def is_running(self) -> bool:
        """Whether the process is RUNNING. Raises DriverError if the state is unknown."""
        return await self.state() is ProcessState.RUNNING

    async def is_locked(self) -> bool:
        """Whether the process is LOCKED. Raises DriverError if the state is unknown."""
        return await self.state() is ProcessState.LOCKED

    async def is_checkpointed(self) -> bool:
        """Whether the process is CHECKPOINTED. Raises DriverError if the state is unknown."""
        return await self.state() is ProcessState.CHECKPOINTED

    async def wait_for_state(self, expected: ProcessState, timeout_s: float) -> ProcessState:
        """Polls every 25 ms until the process is in the state. There is at least one query.

        Raises:
            WaitTimeoutError: The time passed.
            DriverError: The driver returned an error, or the process is FAILED, which is permanent.
        """
        deadline = trio.current_time() + timeout_s
        while (state := await self.state()) != expected:
            if state is ProcessState.FAILED:
                raise DriverError(DriverCall.STATE, self.pid, ILLEGAL_STATE, "the process stays FAILED")
            remaining_s = deadline - trio.current_time()
            if remaining_s <= 0:
                raise WaitTimeoutError(
                    f"process {self.pid} is {state.name} after {timeout_s:g} s, not {expected.name}"
                )
            await trio.sleep(min(POLL_INTERVAL_S, remaining_s))
        return state

    async def restore_thread_id(self) -> int:
        """Id of the driver's thread in the process: the cheapest evidence that the process uses CUDA."""
        value = (await self._call(DriverCall.RESTORE_THREAD_ID)).value
        if value is None:
            raise DriverError(DriverCall.RESTORE_THREAD_ID, self.pid, None, "no thread id")
        return value

    async def trace_obstacle(self) -> str | None:
        """Why the driver helper may not control the process, with the remedy. None: it may."""
        return (await self._call(DriverCall.TRACE_PERMISSION)).obstacle or None

    async def try_lock(self, timeout_s: float = DEFAULT_LOCK_TIMEOUT_S) -> LockResult:
        """RUNNING → LOCKED, or TIMED_OUT with the process still RUNNING."""
        timeout_ms = lock_timeout_ms(timeout_s)
        request = self._request(DriverCall.LOCK, lock_timeout_ms=timeout_ms)
        reply = await self.driver.call(request, timeout_ms / 1000)
        if reply.result == NOT_READY:
            return LockResult.TIMED_OUT
        self._checked(DriverCall.LOCK, reply)
        return LockResult.LOCKED

    async def lock(self, timeout_s: float = DEFAULT_LOCK_TIMEOUT_S) -> None:
        """RUNNING → LOCKED: its CUDA calls block from here on. A timeout is a DriverError of NOT_READY."""
        if await self.try_lock(timeout_s) is LockResult.TIMED_OUT:
            raise DriverError(DriverCall.LOCK, self.pid, NOT_READY, "CUDA_ERROR_NOT_READY")

    async def checkpoint(self, extra_s: float = TRANSFER_TIMEOUT_S) -> None:
        """LOCKED → CHECKPOINTED: its device memory moves to host memory.

        Args:
            extra_s: Time of the call beyond the driver's floor.
        """
        await self._call(DriverCall.CHECKPOINT, extra_s)

    async def restore(self, gpu_pairs: tuple[GpuPair, ...] = (), extra_s: float = TRANSFER_TIMEOUT_S) -> None:
        """CHECKPOINTED → LOCKED.

        Args:
            gpu_pairs: Pairs that name every GPU of the host. Empty: on the same GPUs.
            extra_s: Time of the call beyond the driver's floor.
        """
        pairs = [(pair.old_uuid, pair.new_uuid) for pair in gpu_pairs]
        request = self._request(DriverCall.RESTORE, gpu_pairs=pairs)
        self._checked(DriverCall.RESTORE, await self.driver.call(request, extra_s))

    async def unlock(self) -> None:
        """LOCKED → RUNNING."""
        await self._call(DriverCall.UNLOCK)

    async def suspend(self, lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S) -> None:
        """RUNNING → CHECKPOINTED. If the checkpoint fails, the process is unlocked again.

        A cancellation during the lock undoes the lock. A later one waits for the checkpoint.

        Raises:
            LeftLockedError: The process could not be unlocked again.
        """
        try:
            await self.lock(lock_timeout_s)
        except DriverCallUnansweredError as error:
            await self._unlock_after(error)
            raise
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            with trio.CancelScope(shield=True):
                await self.checkpoint()
        except BaseException as error:
            await self._unlock_after(error)
            raise

    async def resume(self, gpu_pairs: tuple[GpuPair, ...] = ()) -> None:
        """CHECKPOINTED → RUNNING, on the GPUs of the pairs. The call is finished before a cancellation.

        After a restore that did not return, the process is unlocked too, if it was restored.

        Raises:
            LeftLockedError: The process was restored, and could not be unlocked.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=True):
            try:
                await self.restore(gpu_pairs)
            except DriverCallUnansweredError as error:
                await self._unlock_after(error)
                raise
            try:
                await self.unlock()
            except CALL_ERRORS as error:
                await self._unlock_after(error)

    async def _unlock_after(self, cause: BaseException) -> None:
        """Unlocks the process if it is LOCKED, in two attempts: its CUDA calls would hang forever.

        Raises:
            LeftLockedError: The process is still LOCKED, or its state is unknown.
        """
        seen = "perhaps LOCKED"
        with trio.CancelScope(shield=True):
            for _ in range(2):
                with suppress(*CALL_ERRORS):
                    if not await self.is_locked():
                        return
                    seen = "LOCKED"
                    await self.unlock()
                    return
        raise LeftLockedError(
            f"process {self.pid} is {seen}, and its CUDA calls block until it is unlocked: "
            f"unlock it again ({cause or type(cause).__name__})"
        ) from cause

    async def toggle(
        self, lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S, gpu_pairs: tuple[GpuPair, ...] = ()
    ) -> ProcessState:
        """Suspends a RUNNING process or resumes a CHECKPOINTED one, and returns the state read afterwards.

        Never part of a command: a repeated toggle undoes itself.

        Raises:
            DriverError: ILLEGAL_STATE in every other state, besides the errors of the calls.
        """
        match await self.state():
            case ProcessState.RUNNING:
                await self.suspend(lock_timeout_s)
            case ProcessState.CHECKPOINTED:
                await self.resume(gpu_pairs)
            case state:
                raise DriverError(
                    DriverCall.STATE, self.pid, ILLEGAL_STATE, f"can't toggle a process that is {state.name}"
                )
        return await self.state()
