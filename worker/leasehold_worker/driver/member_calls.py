"""One driver call on one member, with its outcome.

The state is read after every call, and the driver's answer has precedence over the worker's record. A member
whose call did not return is queried and reported; it gets no second call of the same kind.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final, final

from leasehold.v1 import errors_pb2
from leasehold.v1.workload_pb2 import MemberState

from leasehold_worker.driver.errors import DriverError
from leasehold_worker.driver.gpu_pairs import GpuPair, rebase_pairs
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.members import (
    CHECKPOINTED,
    GONE,
    LOCKED,
    RUNNING,
    UNKNOWN,
    WEDGED,
    MemberOutcome,
    Phase,
    member_state,
    state_name,
    unanswered,
    unavailable,
)
from leasehold_worker.driver.process import (
    DEFAULT_LOCK_TIMEOUT_S,
    CheckpointProcess,
)
from leasehold_worker.driver.transfer_rates import Rates
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.inventory import Inventory
from leasehold_worker.host.processes import (
    DYING_S,
    ProcessIdentity,
    ends_soon,
    has_ended,
    held,
    identify,
    will_end,
)
from leasehold_worker.threads import run_in_thread

DESTINATIONS: Final = {
    DriverCall.LOCK: LOCKED,
    DriverCall.CHECKPOINT: CHECKPOINTED,
    DriverCall.RESTORE: LOCKED,
    DriverCall.UNLOCK: RUNNING,
}
TRANSFERS: Final = frozenset({DriverCall.CHECKPOINT, DriverCall.RESTORE})


_ENDS: Final = frozenset({errors_pb2.ERROR_REASON_TARGET_CRASHED, errors_pb2.ERROR_REASON_IDENTITY_MISMATCH})
"""Errors reported for a member that has ended."""


class CallNotMadeError(OperationError):
    """The driver was not called: the process could not be opened, or no helper was available."""


@dataclass(frozen=True, slots=True)
class DriverStep:
    """One driver call, for some members.

    Attributes:
        call: The call.
        lock_timeout_s: Time for submitted work to finish.
        gpu_pairs: For a restore: complete pairs from the GPUs before the suspend; none if all stay.
        extra_s: Time beyond the floor of every call.
        rollback: Whether it is part of a rollback.
    """

    call: DriverCall
    lock_timeout_s: float = DEFAULT_LOCK_TIMEOUT_S
    gpu_pairs: tuple[GpuPair, ...] = ()
    extra_s: float = 0.0
    rollback: bool = False


@final
class MemberCaller:
    """Makes calls on members."""

    def __init__(self, driver: Driver, inventory: Inventory, rates: Rates) -> None:
        self._driver = driver
        self._inventory = inventory
        self._rates = rates

    async def take(self, step: DriverStep, outcome: MemberOutcome) -> None:
        """Makes the call, and records the member's outcome.

        Raises:
            CallNotMadeError: The member's state is unchanged.
            OperationError: The member did not reach the state of the call.
        """
        started = time.monotonic()
        failed = True
        try:
            with _held(outcome.member.identity) as pidfd:
                if pidfd is None:
                    outcome.state_after = GONE
                    raise _gone(outcome.member.identity, step.call)
                await self._take_held(step, outcome, pidfd)
            failed = False
        finally:
            moved = outcome.member.total_bytes or None if step.call in TRANSFERS and not failed else None
            duration_s = time.monotonic() - started
            outcome.phases.append(Phase(step.call, duration_s, moved, failed, step.rollback, started))
        if moved is not None:
            chip = self._inventory.chips.get(next(iter(outcome.member.device_memory_bytes)), "")
            self._rates.learn(chip, step.call, moved, duration_s)

    async def look_again(self, outcome: MemberOutcome) -> bool:
        """Reads a member's state again, unless only its end is possible. True: it has changed.

        Raises:
            CallNotMadeError: The state could not be read.
        """
        if outcome.standing in (GONE, WEDGED):
            return False
        with _held(outcome.member.identity) as pidfd:
            state = GONE
            if pidfd is not None:
                process = _process(self._driver, outcome.member.identity)
                state = await _probe(process, pidfd) or outcome.state_after
        surprised = state != outcome.standing
        outcome.state_after = state
        return surprised

    async def find_death(self, outcome: MemberOutcome) -> None:
        """Records the end of a member as its error, since that explains any other error.

        If the driver refused with OPERATING_SYSTEM and the state can't be read, the call waits for the end.
        """
        error, identity = outcome.error, outcome.member.identity
        refused = error is not None and error.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
        if await will_end(identity, DYING_S if refused and outcome.state_after == UNKNOWN else 0):
            outcome.state_after = GONE
            if error is None or error.reason not in _ENDS:
                outcome.error = _gone(identity, outcome.phases[-1].call if outcome.phases else None)

    async def _take_held(self, step: DriverStep, outcome: MemberOutcome, pidfd: int) -> None:
        process = _process(self._driver, outcome.member.identity)
        try:
            await _call(process, step, outcome)
        except DriverError as error:
            await self._after_error(process, step, outcome, pidfd, error)
            return
        except DriverCallUnansweredError as error:
            await self._after_silence(process, step, outcome, pidfd, error)
            return
        except DriverUnavailableError as error:
            refusal = unavailable(error)
            raise CallNotMadeError(refusal.reason, refusal.message) from error
        destination = DESTINATIONS[step.call]
        state = await _probe(process, pidfd)
        if step.call is DriverCall.UNLOCK and state == LOCKED:
            state = await _unlock_again(process, pidfd)
        outcome.state_after, outcome.assumed = state or UNKNOWN, destination
        if state == GONE:
            raise _gone(outcome.member.identity, step.call)
        if step.call is DriverCall.RESTORE and state == destination:
            outcome.displacement = step.gpu_pairs
        elif state != destination:
            await self._find_displacement(step, outcome)
            seen = state_name(state) if state is not None else "unreadable"
            raise OperationError(
                errors_pb2.ERROR_REASON_DRIVER_ERROR,
                f"{step.call} of process {process.pid} succeeded, but its state is {seen}",
                {"pid": str(process.pid), "phase": str(step.call), "observed_state": seen},
            )

    async def _after_silence(
        self,
        process: CheckpointProcess,
        step: DriverStep,
        outcome: MemberOutcome,
        pidfd: int,
        error: DriverCallUnansweredError,
    ) -> None:
        """Reads the member's state after a call that did not return.

        Raises:
            OperationError: The member did not reach the state of the call. A member without an answer is left
                alone.
        """
        state = await _probe(process, pidfd)
        if step.call is DriverCall.UNLOCK and state == LOCKED:
            state = await _unlock_again(process, pidfd)
        outcome.state_after, outcome.assumed = state or UNKNOWN, None
        if step.call is DriverCall.UNLOCK and state == RUNNING:
            return
        await self._find_displacement(step, outcome)
        raise unanswered(error, process.pid, step.call) from error

    async def _after_error(
        self,
        process: CheckpointProcess,
        step: DriverStep,
        outcome: MemberOutcome,
        pidfd: int,
        error: DriverError,
    ) -> None:
        """Reads the member's state after an error of the driver.

        Raises:
            OperationError: The member did not reach the state of the call. A failed unlock is repeated once.
        """
        before = outcome.standing
        with_pairs = bool(_pairs_to_send(step, outcome))
        state = await _probe(process, pidfd)
        if step.call is DriverCall.UNLOCK and state == LOCKED:
            state = await _unlock_again(process, pidfd)
        outcome.state_after, outcome.assumed = state or UNKNOWN, before
        if step.call is DriverCall.UNLOCK and state == RUNNING:
            return
        await self._find_displacement(step, outcome)
        wedged = state == CHECKPOINTED and error.wedges(with_pairs=with_pairs)
        if wedged:
            outcome.state_after = WEDGED
        raise error.to_operation_error(
            observed_state=state_name(outcome.state_after), alive=outcome.state_after != GONE, wedged=wedged
        ) from error

    async def _find_displacement(self, step: DriverStep, outcome: MemberOutcome) -> None:
        """Asks NVML for the GPUs of a member after a failed restore, which may have moved it after all."""
        if step.call is not DriverCall.RESTORE:
            return
        moves = {pair.old_uuid: pair.new_uuid for pair in step.gpu_pairs}
        wanted = {moves.get(gpu_uuid, gpu_uuid) for gpu_uuid in outcome.member.gpu_uuids}
        usage = await run_in_thread(self._inventory.usage)
        pid = outcome.member.identity.pid
        if wanted and wanted == {gpu_uuid for gpu_uuid, gpu in usage.items() if pid in gpu.processes}:
            outcome.displacement = step.gpu_pairs


def _process(driver: Driver, identity: ProcessIdentity) -> CheckpointProcess:
    return CheckpointProcess(driver, identity.pid, identity.start_time_ticks)


@contextmanager
def _held(identity: ProcessIdentity) -> Iterator[int | None]:
    """Like :func:`held`, but raises CallNotMadeError if the process can't be opened."""
    with ExitStack() as stack:
        try:
            pidfd = stack.enter_context(held(identity))
        except OperationError as error:
            raise CallNotMadeError(error.reason, error.message, error.metadata) from error
        yield pidfd


async def _call(process: CheckpointProcess, step: DriverStep, outcome: MemberOutcome) -> None:
    match step.call:
        case DriverCall.LOCK:
            await process.lock(step.lock_timeout_s)
        case DriverCall.CHECKPOINT:
            await process.checkpoint(step.extra_s)
        case DriverCall.RESTORE:
            await process.restore(_pairs_to_send(step, outcome), step.extra_s)
        case DriverCall.UNLOCK:
            await process.unlock()
        case other:
            raise ValueError(f"{other} is not a step")


def _pairs_to_send(step: DriverStep, outcome: MemberOutcome) -> tuple[GpuPair, ...]:
    """The GPU pairs for the driver, which begin at the present GPUs of a member."""
    return rebase_pairs(step.gpu_pairs, outcome.displacement)


async def _probe(process: CheckpointProcess, pidfd: int) -> MemberState.ValueType | None:
    """The state of a member, queried twice at most. None: the driver does not answer."""
    refused = False
    for _ in range(2):
        if has_ended(pidfd):
            return GONE
        try:
            return member_state(await process.state())
        except DriverError:
            refused = True
        except (DriverCallUnansweredError, DriverUnavailableError):
            continue
    return GONE if has_ended(pidfd) or (refused and await ends_soon(pidfd, process.pid)) else None


async def _unlock_again(process: CheckpointProcess, pidfd: int) -> MemberState.ValueType | None:
    """Unlocks a LOCKED member once more, since its CUDA calls would hang forever."""
    # The error of this second attempt is dropped: the first error is reported.
    with suppress(DriverError, DriverCallUnansweredError, DriverUnavailableError):
        await process.unlock()
    return await _probe(process, pidfd)


def _gone(identity: ProcessIdentity, call: DriverCall | None) -> OperationError:
    metadata = {"pid": str(identity.pid)} | ({"phase": str(call)} if call else {})
    if identify(identity.pid) not in (None, identity):
        return OperationError(
            errors_pb2.ERROR_REASON_IDENTITY_MISMATCH,
            f"pid {identity.pid} now belongs to another process, which is left alone",
            metadata,
        )
    return OperationError(
        errors_pb2.ERROR_REASON_TARGET_CRASHED, f"process {identity.pid} has ended", metadata
    )
