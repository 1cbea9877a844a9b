"""The rules for the release of a workload, which goes on without a lease. Pure."""

from leasehold.v1 import errors_pb2

from leasehold_worker.errors import OperationError
from leasehold_worker.workloads.states import RUNNING, state_text
from leasehold_worker.workloads.workload import LET_GO, Workload


def check_releasable(workload: Workload) -> None:
    """Checks that a workload can be released now.

    Raises:
        OperationError: WRONG_STATE: Leasehold started the workload, or the workload is not running.
    """
    if workload.origin not in LET_GO:
        end = "" if workload.absent else f", or end its first process, pid {workload.root.pid}"
        raise OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} was started by Leasehold: stop it instead, by "
            f"`leasehold stop {workload.name}` of a coordinator's client{end}",
        )
    if workload.state != RUNNING:
        state = state_text(workload.state)
        raise OperationError(
            errors_pb2.ERROR_REASON_WRONG_STATE,
            f"workload {workload.name} is {state}, and releasing it would leave it so: "
            "restore it first, or stop it",
            {"observed_state": state},
        )
