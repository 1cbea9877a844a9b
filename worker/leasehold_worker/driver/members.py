"""CUDA processes of a workload: identity, state, and the outcome of an operation on each."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import trio
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold.v1.workload_pb2 import MemberState

from leasehold_worker.driver.errors import NOT_CUDA, DriverError
from leasehold_worker.driver.gpu_pairs import GpuPair
from leasehold_worker.driver.helper_pool import Driver, DriverCallUnansweredError, DriverUnavailableError
from leasehold_worker.driver.helper_protocol import DriverCall
from leasehold_worker.driver.process import CheckpointProcess, ProcessState
from leasehold_worker.errors import OperationError
from leasehold_worker.host.processes import ProcessIdentity, will_end

RUNNING: Final = workload_pb2.MEMBER_STATE_RUNNING
LOCKED: Final = workload_pb2.MEMBER_STATE_LOCKED
CHECKPOINTED: Final = workload_pb2.MEMBER_STATE_CHECKPOINTED
FAILED: Final = workload_pb2.MEMBER_STATE_FAILED
WEDGED: Final = workload_pb2.MEMBER_STATE_WEDGED
UNKNOWN: Final = workload_pb2.MEMBER_STATE_UNKNOWN
GONE: Final = workload_pb2.MEMBER_STATE_GONE

STUCK: Final = frozenset(
    {WEDGED, FAILED, workload_pb2.MEMBER_STATE_CHECKPOINTING, workload_pb2.MEMBER_STATE_RESTORING}
)
"""States from which no driver call leads on: they last until the process ends."""

PARALLEL_LIMIT: Final = 8
"""Members of one operation that are called at once."""

_LINE: Final = (RUNNING, LOCKED, CHECKPOINTED)
_DOWN: Final = {RUNNING: DriverCall.LOCK, LOCKED: DriverCall.CHECKPOINT}
_UP: Final = {CHECKPOINTED: DriverCall.RESTORE, LOCKED: DriverCall.UNLOCK}

_MEMBER_STATES: Final = {
    ProcessState.RUNNING: RUNNING,
    ProcessState.LOCKED: LOCKED,
    ProcessState.CHECKPOINTED: CHECKPOINTED,
    ProcessState.FAILED: FAILED,
    ProcessState.CHECKPOINTING: workload_pb2.MEMBER_STATE_CHECKPOINTING,
    ProcessState.RESTORING: workload_pb2.MEMBER_STATE_RESTORING,
}


def member_state(state: ProcessState) -> MemberState.ValueType:
    """The driver's state in its form on the wire; UNKNOWN for one of a newer driver."""
    return _MEMBER_STATES.get(state, UNKNOWN)


def state_since(before: MemberState.ValueType, told: MemberState.ValueType) -> MemberState.ValueType:
    """The state of a member after another query of the driver.

    The driver reports a wedged process as CHECKPOINTED forever (NVIDIA/cuda-checkpoint issue 44).
    """
    return WEDGED if before == WEDGED and told == CHECKPOINTED else told


def state_name(state: MemberState.ValueType) -> str:
    """The name of a state, for messages."""
    return MemberState.Name(state).removeprefix("MEMBER_STATE_")


def next_call(state: MemberState.ValueType, target: MemberState.ValueType) -> DriverCall | None:
    """The call that takes a member one step towards a state on the line.

    None: the member is there, or no call leads on from its state.
    """
    if state not in _LINE or target not in _LINE or state == target:
        return None
    return _DOWN.get(state) if _LINE.index(state) < _LINE.index(target) else _UP.get(state)


@dataclass(frozen=True, slots=True)
class Member:
    """One CUDA process of a workload.

    Attributes:
        identity: The process.
        state: State as the driver reports it, or one that it can't report (WEDGED, UNKNOWN, GONE).
        device_memory_bytes: Device memory in use by GPU UUID; a GPU is missing if unknown.
        displacement: Complete pairs from its workload's GPUs to those where the driver has its content, after
            a restore elsewhere that was rolled back. Empty: they are the same.
        gpu_uuids: GPUs on which NVML listed the process. Empty: it has no context, or NVML does not list it.
    """

    identity: ProcessIdentity
    state: MemberState.ValueType
    device_memory_bytes: Mapping[str, int] = field(default_factory=dict)
    displacement: tuple[GpuPair, ...] = ()
    gpu_uuids: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Device memory on all GPUs."""
        return sum(self.device_memory_bytes.values())


@dataclass(frozen=True, slots=True)
class Phase:
    """One driver call on one member.

    Attributes:
        call: The driver call.
        duration_s: Duration, with reading the state afterwards.
        moved_bytes: Moved device memory. None: none, or unknown.
        failed: The member did not reach the state of the call.
        rollback: The call was part of a rollback.
        began_s: When it began, by the monotonic clock.
    """

    call: DriverCall
    duration_s: float
    moved_bytes: int | None = None
    failed: bool = False
    rollback: bool = False
    began_s: float = 0.0


@dataclass(slots=True)
class MemberOutcome:
    """The effect of an operation on one member.

    Attributes:
        member: The member before the operation.
        state_before: State before the operation.
        state_after: State after it; UNKNOWN if the driver could not be asked.
        phases: Its driver calls, in order.
        error: Its first error; MEMBER_WEDGED has precedence.
        rolled_back: Whether its rollback succeeded. None: no rollback was needed.
        displacement: As that of a member.
        assumed: Most likely state while ``state_after`` is UNKNOWN. None: the member is left alone.
    """

    member: Member
    state_before: MemberState.ValueType
    state_after: MemberState.ValueType
    phases: list[Phase] = field(default_factory=list)
    error: OperationError | None = None
    rolled_back: bool | None = None
    displacement: tuple[GpuPair, ...] = ()
    assumed: MemberState.ValueType | None = None

    @classmethod
    def of(cls, member: Member) -> "MemberOutcome":
        """The outcome before the operation."""
        return cls(member, member.state, member.state, displacement=member.displacement)

    @property
    def standing(self) -> MemberState.ValueType:
        """The state for the next call."""
        if self.state_after == UNKNOWN and self.assumed is not None:
            return self.assumed
        return self.state_after

    def note_error(self, error: OperationError) -> None:
        """Records an error, unless there is one. A wedged member explains the errors before."""
        if self.error is None or error.reason == errors_pb2.ERROR_REASON_MEMBER_WEDGED:
            self.error = error

    def member_after(self) -> Member:
        """The member after the operation."""
        return replace(self.member, state=self.state_after, displacement=self.displacement)


async def find_members(driver: Driver, processes: Iterable[ProcessIdentity]) -> tuple[Member, ...]:
    """Asks the driver which of the processes use CUDA, with the state of each.

    The first query is for the restore-thread id: get-state also answers for launchers that share /proc with a
    job. That query needs no permission, and get-state does (seen on 580.159.04). So a CUDA process that the
    worker may not control is found, and refused.

    Raises:
        OperationError: The driver can't be asked. PERMISSION_OR_OS: the worker may not control a process.
    """
    wanted = list(processes)
    found: dict[ProcessIdentity, Member] = {}
    errors: list[OperationError] = []
    limit = trio.CapacityLimiter(PARALLEL_LIMIT)

    async def probe(identity: ProcessIdentity) -> None:
        process = CheckpointProcess(driver, identity.pid, identity.start_time_ticks)
        try:
            async with limit:
                await process.restore_thread_id()
                found[identity] = Member(identity, member_state(await process.state()))
        except DriverError as error:
            not_cuda = error.call is DriverCall.RESTORE_THREAD_ID and error.result in NOT_CUDA
            if not error.ended and not not_cuda and not await will_end(identity):
                errors.append(error.to_operation_error(observed_state="unknown", alive=True))
        except DriverCallUnansweredError as error:
            errors.append(unanswered(error, identity.pid, DriverCall.STATE))
        except DriverUnavailableError as error:
            errors.append(unavailable(error))

    async with trio.open_nursery() as nursery:
        for identity in wanted:
            nursery.start_soon(probe, identity)
    if errors:
        raise errors[0]
    return tuple(found[identity] for identity in wanted if identity in found)


def bytes_by_gpu(members: Iterable[Member]) -> dict[str, int]:
    """Device memory of all members, by the UUID of the GPU."""
    total: dict[str, int] = {}
    for member in members:
        for gpu_uuid, used_bytes in member.device_memory_bytes.items():
            total[gpu_uuid] = total.get(gpu_uuid, 0) + used_bytes
    return total


def are_unlisted(members: Collection[Member]) -> bool:
    """Whether NVML listed none of the members. If it lists one, the others have no context."""
    return bool(members) and not any(member.gpu_uuids for member in members)


def needed_by_gpu(members: Collection[Member], home: Iterable[str]) -> dict[str, int]:
    """Device memory that members need, by the UUID of their current or former GPU.

    Args:
        members: Members of one workload, measured.
        home: GPUs of that workload. A GPU with an unknown need is missing in the result.
    """
    total = bytes_by_gpu(members)
    if not total and are_unlisted(members):
        return {}
    unknown = {uuid for each in members for uuid in each.gpu_uuids if uuid not in each.device_memory_bytes}
    return {gpu_uuid: total.get(gpu_uuid, 0) for gpu_uuid in (*home, *total) if gpu_uuid not in unknown}


def members_after(outcomes: Sequence[MemberOutcome]) -> tuple[Member, ...]:
    """The members after an operation."""
    return tuple(outcome.member_after() for outcome in outcomes)


def unanswered(error: DriverCallUnansweredError, pid: int, call: DriverCall) -> OperationError:
    """A call that did not return, as an error for the wire."""
    reason = errors_pb2.ERROR_REASON_DRIVER_TIMEOUT if error.expired else errors_pb2.ERROR_REASON_DRIVER_ERROR
    if call in (DriverCall.STATE, DriverCall.TRACE_PERMISSION):
        meaning = "the state of the process is unknown, as a peer of it may have delayed the call: try again"
    else:
        meaning = (
            "the effect of the call is unknown: if the workload is UNKNOWN, restore it, which asks the "
            "driver again; else look for a debugger and Xid errors, and try again"
        )
    return OperationError(reason, f"{error}, so {meaning}", {"pid": str(pid), "phase": str(call)})


def unavailable(error: DriverUnavailableError) -> OperationError:
    """The lack of a driver, as an error for the wire."""
    return OperationError(
        errors_pb2.ERROR_REASON_UNSUPPORTED_DRIVER,
        f"there is no usable CUDA driver ({error}): see `leasehold doctor`",
    )
