"""Watches one workload until it is ready or has ended."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final, Literal, TypeAlias

import grpc
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.aio.retry import is_transient, resume
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, WaitTimeoutError

Condition: TypeAlias = Literal["ready", "ended"]

RUNNING: Final = workload_pb2.WORKLOAD_STATE_RUNNING
ENDED: Final = frozenset(
    {
        workload_pb2.WORKLOAD_STATE_EXITED,
        workload_pb2.WORKLOAD_STATE_FAILED,
        workload_pb2.WORKLOAD_STATE_RELEASED,
    }
)


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
        name: Id or name of the workload, for messages.
        condition: The condition.
        timeout_s: Longest wait. None: no limit.

    Raises:
        WaitTimeoutError: The wait timed out.
        LeaseholdError: WRONG_STATE: the workload ended before it was ready.
        NoCoordinatorError: The outage lasted longer.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    seen: tuple[int, bool] | None = None

    async def attempt() -> AsyncGenerator[Workload]:
        nonlocal seen
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            async with aclosing(open_stream(left_s)) as stream:
                async for current in stream:
                    facts = (current.status.state, is_ready(current))
                    if facts != seen:  # a reopened watch repeats the last state, which is no progress
                        seen = facts
                        yield current
        except NoCoordinatorError as error:
            if error.code == grpc.StatusCode.DEADLINE_EXCEEDED and deadline is not None:
                raise WaitTimeoutError(
                    f"workload {name} has not {_DONE[condition]} within {timeout_s:g} s; it continues, and "
                    f"`leasehold get workloads {name}` shows its state"
                ) from None
            raise

    async with aclosing(resume(attempt, _may_reopen)) as states:
        async for current in states:
            if condition == "ended" and current.status.state in ENDED:
                return current
            if current.status.state in ENDED:
                raise _ended_early(current, name)
            if condition == "ready" and is_ready(current):
                return current
    raise NoCoordinatorError(f"the coordinator ended the watch of workload {name}; the workload continues")


_DONE: Final = {"ready": "become ready", "ended": "ended"}


def _ended_early(workload: Workload, name: str) -> LeaseholdError:
    state = workload_pb2.WorkloadState.Name(workload.status.state).removeprefix("WORKLOAD_STATE_")
    return LeaseholdError(
        f"workload {name} is {state}: it ended before it was ready; `leasehold logs {name}` shows its output",
        "WRONG_STATE",
    )


def _may_reopen(error: LeaseholdError) -> bool:
    """Whether a watch is reopened: the error is transient, or the watch fell behind."""
    return is_transient(error) or error.reason == "INVALID_TOKEN"
