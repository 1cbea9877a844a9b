"""What must hold before an operation begins."""

import os
from dataclasses import replace

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold_worker.driver.members import CHECKPOINTED, FAILED, LOCKED, RUNNING, Member
from leasehold_worker.errors import OperationError
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.planning.workload_checks import require_members, require_state

from tests.worker.workloads.test_foreign_processes import workload_of

IDENTITY = ProcessIdentity(Pid(os.getpid()), 1)
MEMBER = Member(ProcessIdentity(Pid(2**22 + 1), 1), RUNNING)


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        (workload_pb2.WORKLOAD_STATE_RUNNING, "suspend it first"),
        (workload_pb2.WORKLOAD_STATE_CHECKPOINTED, "restore it first"),
        (workload_pb2.WORKLOAD_STATE_UNKNOWN, "restore it first, without naming GPUs"),
        (workload_pb2.WORKLOAD_STATE_WEDGED, "stop it, nothing else helps"),
        (workload_pb2.WORKLOAD_STATE_EXITED, "run it again"),
        (workload_pb2.WORKLOAD_STATE_REMAPPING, "wait until its command has ended"),
    ],
)
def test_a_wrong_state_is_told_with_what_leads_to_the_right_one(state: int, remedy: str) -> None:
    workload = workload_of(IDENTITY)
    workload.state = workload_pb2.WorkloadState.ValueType(state)
    with pytest.raises(OperationError) as raised:
        require_state(workload, (workload_pb2.WORKLOAD_STATE_SUSPENDED,), "restored")
    name = workload_pb2.WorkloadState.Name(workload.state).removeprefix("WORKLOAD_STATE_")
    assert raised.value.message == (f"workload w-1 is {name}, and must be SUSPENDED to be restored: {remedy}")


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        (LOCKED, "another program suspended it"),
        (CHECKPOINTED, "or restart the worker and restore the workload"),
        (FAILED, "stop the workload"),
    ],
    ids=["locked", "checkpointed", "failed"],
)
def test_a_member_in_a_wrong_state_is_told_with_its_remedy(state: int, remedy: str) -> None:
    member = replace(MEMBER, state=workload_pb2.MemberState.ValueType(state))
    with pytest.raises(OperationError, match=remedy) as raised:
        require_members(workload_of(IDENTITY), [member])
    assert raised.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
