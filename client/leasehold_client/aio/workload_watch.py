"""Watches one workload until a condition holds: ready, ended, or a state."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, TypeAlias

import grpc
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import Workload, WorkloadState

from leasehold_client.aio.retry import is_transient, resume
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, UsageError, WaitTimeoutError
from leasehold_client.messages import PARKED, workload_state

Condition: TypeAlias = str
"""``ready``, ``ended``, or the name of a WorkloadState without its prefix, such as ``SUSPENDED``."""

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
ENDED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_EXITED,
        workload_pb2.WORKLOAD_STATE_FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    }
)
STATES: Final = {
    name.removeprefix("WORKLOAD_STATE_"): state
    for name, state in workload_pb2.WorkloadState.items()
    if state != workload_pb2.WORKLOAD_STATE_UNSPECIFIED
}
"""The states of workloads, by the names that conditions have."""

FIRST_LOOK_S: Final = 2.0
"""Deadline of the first state, which is looked at even if the timeout is zero."""


def is_ready(workload: Workload) -> bool:
    """Whether a workload is RUNNING and its program is ready."""
    return workload.status.state == RUNNING and workload.status.HasField("ready_time")


async def wait_workload(
    open_stream: Callable[[float | None], AsyncGenerator[Workload]],
    name: str,
    condition: Condition,
    timeout_s: float | None,
) -> Workload:
    """Waits for a condition of a workload, and returns the workload.

    An outage of the coordinator is tolerated for 30 s.

    Args:
        open_stream: Opens a watch that ends with DEADLINE_EXCEEDED after so many seconds. None: no deadline.
        name: Id or name of the workload, for messages until its name is known.
        condition: The condition.
        timeout_s: Longest wait. None: no limit.

    Raises:
        UsageError: The condition does not exist.
        WaitTimeoutError: The wait timed out.
        LeaseholdError: WRONG_STATE: the workload ended before the condition held.
        NoCoordinatorError: The outage lasted longer.
    """
    holds = _test_of(condition)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    seen: Workload | None = None

    async def attempt() -> AsyncGenerator[Workload]:
        nonlocal seen, name
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if left_s == 0 and seen is None:
            left_s = FIRST_LOOK_S
        try:
            async with aclosing(open_stream(left_s)) as stream:
                async for current in stream:
                    name = current.name
                    former, seen = seen, current
                    # A reopened watch repeats the last state, which is no progress.
                    if former is None or _facts(former) != _facts(current):
                        yield current
                    if deadline is not None and time.monotonic() >= deadline:
                        raise too_late()
        except NoCoordinatorError as error:
            if error.code == grpc.StatusCode.DEADLINE_EXCEEDED and deadline is not None:
                raise too_late() from None
            raise

    def too_late() -> WaitTimeoutError:
        waited_s = f"{round(timeout_s or 0, 1):.10g}"
        late = f"workload {name} {_not_yet(condition)} within {waited_s} s"
        if seen is None:
            return WaitTimeoutError(f"{late}; `leasehold get workloads {name}` shows its state")
        if seen.out_of_contact:
            return WaitTimeoutError(
                f"{late}: its worker is out of contact, and the last known state is {workload_state(seen)}; "
                "`leasehold get workers` shows the worker"
            )
        state = _state_name(seen.status.state)
        if condition == "ready" and seen.status.state in PARKED:
            return WaitTimeoutError(
                f"workload {name} is {state}, and was not restored within {waited_s} s: "
                f"`leasehold restore {name}`"
            )
        return WaitTimeoutError(
            f"{late}; it continues ({state}), and `leasehold get workloads {name}` shows its state"
        )

    async with aclosing(resume(attempt, _may_reopen, is_patient=True)) as states:
        async for current in states:
            if holds(current):
                return current
            if current.status.state in ENDED:
                raise _ended_early(current, name, condition)
    raise NoCoordinatorError(f"the coordinator ended the watch of workload {name}; the workload continues")


def require_condition(condition: Condition) -> None:
    """Refuses a condition that does not exist.

    Raises:
        UsageError: The condition does not exist.
    """
    if condition not in ("ready", "ended", *STATES):
        raise UsageError(f"{condition!r} is not a state of workloads: choose {', '.join(STATES)}")


def _test_of(condition: Condition) -> Callable[[Workload], bool]:
    """Whether a condition holds, as a function.

    Raises:
        UsageError: The condition does not exist.
    """
    require_condition(condition)
    if condition == "ready":
        return is_ready
    if condition == "ended":
        return lambda workload: workload.status.state in ENDED
    return lambda workload: workload.status.state == STATES[condition]


def _facts(workload: Workload) -> tuple[WorkloadState.ValueType, bool]:
    """The facts that conditions depend on."""
    return workload.status.state, is_ready(workload)


def _not_yet(condition: Condition) -> str:
    done = {"ready": "become ready", "ended": "ended"}.get(condition, f"become {condition}")
    return f"has not {done}"


def _state_name(state: WorkloadState.ValueType) -> str:
    return WorkloadState.Name(state).removeprefix("WORKLOAD_STATE_")


def _ended_early(workload: Workload, name: str, condition: Condition) -> LeaseholdError:
    status = workload.status
    state = _state_name(status.state)
    ended = f"it ended before it was {condition}"
    if condition == "ready" and status.HasField("ready_time"):
        ended = "it was ready, and has ended since"
    why = f"`leasehold logs {name}` shows its output"
    if status.HasField("error") and not status.HasField("start_time"):
        why = f"its program was never started: {status.error.message}"
    return LeaseholdError(f"workload {name} is {state}: {ended}; {why}", "WRONG_STATE")


def _may_reopen(error: LeaseholdError) -> bool:
    """Whether a watch is reopened: the error is transient, or the watch fell behind."""
    return is_transient(error) or error.reason == "INVALID_TOKEN"
