"""Waiting until a workload is ready, or has ended."""

import time
from collections.abc import Callable, Generator, Iterator
from typing import Final, Literal, TypeAlias

import grpc
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_pb2 import Workload

from leasehold_client.coordinator.retry import is_outage, resume
from leasehold_client.errors import LeaseholdError, NoCoordinatorError, NotYetError

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
    """Whether a workload runs, and its program is ready."""
    return workload.status.state == RUNNING and workload.status.HasField("ready_time")


def wait_workload(
    open_stream: Callable[[float | None], Generator[Workload]],
    name: str,
    condition: Condition,
    timeout_s: float | None,
) -> Workload:
    """A workload once it is ready or has ended.

    Args:
        open_stream: Opens a watch of it, which ends with DEADLINE_EXCEEDED after so many seconds. None: never
            by time.
        name: What the caller calls the workload.
        condition: What is waited for.
        timeout_s: How long. None: as long as it takes.

    Raises:
        NotYetError: The time is over.
        LeaseholdError: WRONG_STATE: it ended before it was ready.
        NoCoordinatorError: The coordinator did not come back.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    told: tuple[int, bool] | None = None

    def attempt() -> Iterator[Workload]:
        nonlocal told
        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            for current in open_stream(left_s):
                condition_now = (current.status.state, is_ready(current))
                if condition_now != told:  # told again after each break, which is no sign of progress
                    told = condition_now
                    yield current
        except NoCoordinatorError as error:
            if error.code == grpc.StatusCode.DEADLINE_EXCEEDED and deadline is not None:
                raise NotYetError(
                    f"workload {name} has not {_DONE[condition]} within {timeout_s:g} s; it goes on, and "
                    f"`leasehold get workloads {name}` shows how it stands"
                ) from error
            raise

    for current in resume(attempt, _passes):
        if current.status.state in ENDED:
            if condition == "ended":
                return current
            state = workload_pb2.WorkloadState.Name(current.status.state).removeprefix("WORKLOAD_STATE_")
            raise LeaseholdError(
                f"workload {name} is {state}, and ended before it was ready: look at its output with "
                f"`leasehold logs {name}`",
                "WRONG_STATE",
            )
        if condition == "ready" and is_ready(current):
            return current
    raise NoCoordinatorError(f"the watch of workload {name} ended, and the workload goes on")


_DONE: Final = {"ready": "become ready", "ended": "ended"}


def _passes(error: LeaseholdError) -> bool:
    """Whether a watch that ended is opened anew: the coordinator is away, or the watch fell behind."""
    return is_outage(error) or error.reason == "INVALID_TOKEN"
