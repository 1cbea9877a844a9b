"""Rules for operations, and the workloads and GPUs that operations name. Pure."""

from collections.abc import Container, Sequence
from typing import Final

from leasehold.v1 import workload_pb2
from leasehold.v1.errors_pb2 import (
    ERROR_REASON_DUPLICATE_GPU,
    ERROR_REASON_GENERATION_MISMATCH,
    ERROR_REASON_UNKNOWN_GPU,
    ERROR_REASON_WRONG_STATE,
)
from leasehold.v1.operation_pb2 import Operation, SuspendOperation
from leasehold.v1.workload_pb2 import WORKLOAD_ORIGIN_ADOPT, WORKLOAD_ORIGIN_RUN, Workload, WorkloadState

from leasehold_coordinator.core.field_rules import check_duration, check_gpu_list, check_text
from leasehold_coordinator.core.spec_rules import check_parking, check_policy
from leasehold_coordinator.core.workload_reports import is_concluded
from leasehold_coordinator.core.workload_states import (
    FAILED,
    PARKABLE,
    PARKED,
    RUNNING,
    STOPPABLE,
    STOPPED,
    UNKNOWN,
    WAKEABLE,
    WEDGED,
    is_ended,
    state_name,
)
from leasehold_coordinator.errors import FleetError, invalid

COMMAND_LIMIT_BYTES: Final = 196_608
"""Three quarters of the largest frame. A command above the frame limit would end its worker's stream."""

PID_LIMIT: Final = 2**22
"""The highest pid of Linux."""

PREEMPT_LIMIT: Final = 256
"""Most workloads that a run or a restore preempts: a host has no more GPUs."""

HOLD_LIMIT_S: Final = 600
"""The longest time for which a suspend may hold GPUs."""

MOVE_LIMIT: Final = 256
"""Most moves of one remap: a workload has one move, and a worker at most so many GPUs."""

RELEASABLE: Final = frozenset(
    {workload_pb2.WORKLOAD_ORIGIN_CLAIM, workload_pb2.WORKLOAD_ORIGIN_ADOPT},
)
"""Origins of workloads whose processes Leasehold did not start."""


def creates_workload(operation: Operation) -> bool:
    """Whether the operation creates its workload. If the operation fails, the workload has failed too."""
    return operation.WhichOneof("kind") in ("run", "adopt")


def cordoned_gpus(operation: Operation) -> Sequence[str]:
    """UUIDs that an operation about a worker names. Empty: the operation names no GPU."""
    match operation.WhichOneof("kind"):
        case "cordon":
            return operation.cordon.gpu_uuids
        case "uncordon":
            return operation.uncordon.gpu_uuids
        case "reset_gpu_health":
            return operation.reset_gpu_health.gpu_uuids
        case "delete_checkpoints" | "release_hold":
            return ()
        case kind:
            raise ValueError(f"{kind} is not an operation on a worker")


def named_gpus(operation: Operation) -> set[str]:
    """UUIDs of the GPUs that an operation would take by name."""
    match operation.WhichOneof("kind"):
        case "run":
            return set(operation.run.gpu_uuids)
        case "restore":
            return {*operation.restore.gpu_uuids, *(pair.new_uuid for pair in operation.restore.pairs)}
        case "remap":
            return {pair.new_uuid for move in operation.remap.moves for pair in move.pairs}
        case _:
            return set()


def check_operation(operation: Operation) -> None:
    """Refuses an operation that is invalid in any state of the fleet.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    match operation.WhichOneof("kind"):
        case "suspend":
            if operation.suspend.HasField("lock_timeout"):
                check_duration("operation.lock_timeout", operation.suspend.lock_timeout)
            if operation.suspend.HasField("policy"):
                check_policy("operation.policy", operation.suspend.policy)
            check_hold(operation.suspend)
        case "restore":
            check_gpu_list("operation.gpu_uuids", operation.restore.gpu_uuids)
            check_gpu_list("operation.pairs", operation.restore.pairs)
            check_preempt("operation.preempt", operation.restore.preempt, operation.restore.hold_id)
        case "remap":
            _check_moves(operation)
            if operation.remap.HasField("lock_timeout"):
                check_duration("operation.lock_timeout", operation.remap.lock_timeout)
        case "stop":
            if operation.stop.HasField("grace"):
                check_duration("operation.grace", operation.stop.grace, may_be_zero=True)
        case "adopt":
            if not 0 < operation.adopt.pid <= PID_LIMIT:
                raise invalid(
                    "operation.pid",
                    f"invalid process id {operation.adopt.pid}: give a pid of the worker's host, from 1 on",
                )
            check_parking("operation", operation.adopt)
        case "cordon":
            check_text("operation.reason", operation.cordon.reason, "say why")
            check_text("operation.cordoned_by", operation.cordon.cordoned_by, "say who cordons")
        case "reset_gpu_health":
            if not operation.reset_gpu_health.gpu_uuids:
                raise invalid(
                    "operation.gpu_uuids", "no GPU is named: name those whose health is to be reset"
                )
        case "release_hold":
            check_text("operation.hold_id", operation.release_hold.hold_id, "name the hold")
        case "delete_checkpoints":
            ids = operation.delete_checkpoints.checkpoint_ids
            if not ids or not all(ids):
                raise invalid(
                    "operation.checkpoint_ids",
                    "no checkpoint is named, or an id is empty: `leasehold get checkpoints` lists the ids",
                )
            if len(set(ids)) < len(ids):
                raise invalid("operation.checkpoint_ids", "a checkpoint is named twice: name each once")


def check_hold(suspend: SuspendOperation) -> None:
    """Refuses a hold with an invalid duration, and `held_by` without a hold.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if suspend.hold_id:
        raise invalid("operation.hold_id", "only a worker sets hold_id of a suspend: leave it empty")
    if not suspend.HasField("hold_for"):
        if suspend.held_by:
            raise invalid("operation.held_by", "held_by is given without hold_for: give both, or neither")
        return
    check_duration("operation.hold_for", suspend.hold_for)
    if suspend.hold_for.ToNanoseconds() > HOLD_LIMIT_S * 10**9:
        raise invalid(
            "operation.hold_for",
            f"a hold_for of {suspend.hold_for.ToNanoseconds() / 1e9:g} s is too long: {HOLD_LIMIT_S} s fit",
        )
    if suspend.held_by:
        check_text("operation.held_by", suspend.held_by, "say who holds the GPUs, or leave it out")


def check_preempt(field: str, preempt: Sequence[str], hold_id: str) -> None:
    """Refuses too many workloads to preempt, and a hold beside them.

    Raises:
        FleetError: INVALID_ARGUMENT, which names the field.
    """
    if preempt and hold_id:
        raise invalid(field, "a hold and workloads to preempt exclude each other: give one of the two")
    if len(preempt) > PREEMPT_LIMIT:
        raise invalid(
            field, f"{len(preempt)} workloads are too many to preempt: the limit is {PREEMPT_LIMIT}"
        )


def check_gpus_of_worker(operation: Operation, uuids: Container[str], worker: str) -> None:
    """Refuses an operation on a worker that names a GPU twice, or a GPU that the worker lacks.

    Args:
        operation: The requested operation.
        uuids: The UUIDs of the worker's GPUs.
        worker: The worker's name, for the message.

    Raises:
        FleetError: DUPLICATE_GPU or UNKNOWN_GPU.
    """
    named = cordoned_gpus(operation)
    for number, uuid in enumerate(named):
        if uuid in named[:number]:
            raise FleetError(
                ERROR_REASON_DUPLICATE_GPU,
                f"{uuid} is named twice: name it once",
                field=f"operation.gpu_uuids[{number}]",
            )
        if uuid not in uuids:
            raise FleetError(
                ERROR_REASON_UNKNOWN_GPU,
                f"worker {worker} has no GPU {uuid}: `leasehold get gpus` lists them",
                field="operation.gpu_uuids",
                gpu_uuid=uuid,
            )


def _check_moves(operation: Operation) -> None:
    moves = operation.remap.moves
    if not moves:
        raise invalid("operation.moves", "a remap needs at least one move: name a workload and its pairs")
    if len(moves) > MOVE_LIMIT:
        raise invalid("operation.moves", f"a remap has {len(moves)} moves: give at most {MOVE_LIMIT}")
    for index, move in enumerate(moves):
        field = f"operation.moves[{index}].pairs"
        if not move.pairs:
            raise invalid(field, "a move needs at least one pair: name OLD and NEW")
        check_gpu_list(field, move.pairs)


def check_size(message_bytes: int) -> None:
    """Refuses an operation whose frame would not fit.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    if message_bytes > COMMAND_LIMIT_BYTES:
        raise invalid(
            "operation",
            f"the command has {message_bytes} of at most {COMMAND_LIMIT_BYTES} bytes: make it smaller",
        )


def check_one_worker(workloads: Sequence[Workload]) -> None:
    """Refuses workloads of different workers.

    Raises:
        FleetError: INVALID_ARGUMENT.
    """
    for index, workload in enumerate(workloads):
        if workload.worker_id != workloads[0].worker_id:
            raise invalid(
                f"operation.moves[{index}].workload_id",
                f"{workloads[0].name} and {workload.name} are on different workers, and a remap works within "
                "one worker: use one remap per worker",
            )


def check_generation(workload: Workload, expected: int | None) -> None:
    """Refuses a workload that has changed since the client read it.

    Raises:
        FleetError: GENERATION_MISMATCH.
    """
    generation = workload.status.generation
    if expected is not None and expected != generation:
        raise FleetError(
            ERROR_REASON_GENERATION_MISMATCH,
            f"workload {workload.name} has generation {generation}, not {expected}: "
            "it has changed, so read it again",
        )


def check_state(workload: Workload, operation: Operation) -> None:
    """Refuses an operation that the workload's last reported state does not allow.

    Raises:
        FleetError: WRONG_STATE.
    """
    match operation.WhichOneof("kind"):
        case "suspend":
            _require(workload, PARKABLE, "suspended")
        case "restore":
            wake = operation.restore
            if wake.checkpoint_id:
                _require(workload, frozenset({STOPPED}), "started from a checkpoint")
            moves = bool(wake.gpu_uuids or wake.pairs)
            remedy = "; move it with `leasehold remap`" if workload.status.state == RUNNING else ""
            _require(workload, WAKEABLE if moves else WAKEABLE | {RUNNING}, "restored", remedy)
        case "remap":
            _require(workload, frozenset({RUNNING}), "remapped")
        case "checkpoint":
            _require(workload, frozenset({RUNNING}), "checkpointed")
        case "stop" | "release" if is_ended(workload.status.state):
            _check_started(workload)
        case "stop":
            _require(workload, STOPPABLE, "stopped")
        case "release":
            _check_release(workload)
        case kind:
            raise ValueError(f"{kind} is not an operation on a workload that exists")


_UNHEARD: Final = {
    WORKLOAD_ORIGIN_RUN: "did not start its program",
    WORKLOAD_ORIGIN_ADOPT: "did not adopt its process, which is not Leasehold's",
}
"""Omissions of the worker in words, by the origin of a workload that the worker has never reported."""


def _check_started(workload: Workload) -> None:
    status = workload.status
    why = _UNHEARD.get(workload.origin)
    is_unheard = status.state == FAILED and not status.HasField("start_time")
    if why is not None and is_unheard and not is_concluded(status.error):
        raise FleetError(
            ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is FAILED, and its worker {why}: delete its record with "
            f"`leasehold rm workload {workload.name}`",
            observed_state=state_name(status.state),
        )


def _check_release(workload: Workload) -> None:
    if workload.origin not in RELEASABLE:
        raise FleetError(
            ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} was started by Leasehold: stop it instead",
            observed_state=state_name(workload.status.state),
        )
    if workload.status.state in PARKED:  # no restore would reach it after the release
        raise FleetError(
            ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state_name(workload.status.state)}, and a released workload can't "
            "be restored: restore it first",
            observed_state=state_name(workload.status.state),
        )
    _require(workload, frozenset({RUNNING}), "released")


_REMEDIES: Final = {
    WEDGED: "; stop it, nothing else helps",
    UNKNOWN: "; restore it, which examines its processes again, or stop it",
}
"""Remedies for a workload in a state that allows few operations."""


def _require(
    workload: Workload, states: frozenset[WorkloadState.ValueType], verb: str, remedy: str = ""
) -> None:
    if workload.status.state not in states:
        wanted = " or ".join(sorted(state_name(state) for state in states))
        remedy = remedy or _REMEDIES.get(workload.status.state, "")
        raise FleetError(
            ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state_name(workload.status.state)}: "
            f"only one that is {wanted} can be {verb}{remedy}",
            observed_state=state_name(workload.status.state),
        )
