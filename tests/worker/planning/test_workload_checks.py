"""What must hold before an operation begins."""

import os
from dataclasses import replace

import pytest
from leasehold.v1 import errors_pb2, workload_pb2
from leasehold_worker.driver.members import FAILED, LOCKED, RUNNING, Member, Search
from leasehold_worker.errors import OperationError
from leasehold_worker.gpus.facts import GpuUsage
from leasehold_worker.host.process_files import Pid
from leasehold_worker.host.processes import ProcessIdentity
from leasehold_worker.planning.workload_checks import require_members, require_open, require_state

from tests.worker.workloads.test_foreign_processes import workload_of

CLOSED = ProcessIdentity(Pid(os.getpid()), 1)
FIRST, SECOND = (Member(ProcessIdentity(Pid(2**22 + number), 1), RUNNING) for number in (1, 2))


def listing(*pids: int) -> dict[str, GpuUsage]:
    return {"a": GpuUsage(None, dict.fromkeys(pids)), "b": GpuUsage(None, {})}


def test_a_process_that_can_not_be_traced_is_no_member_where_nvml_lists_all_members() -> None:
    first, second = FIRST.identity.pid, SECOND.identity.pid
    require_open(Search((FIRST, SECOND), (CLOSED,)), listing(first, second))
    require_open(Search((FIRST, SECOND), ()), {})
    require_open(Search((), ()), {})


@pytest.mark.parametrize(
    ("members", "listed", "why"),
    [
        ((FIRST,), (FIRST.identity.pid, CLOSED.pid), "NVML lists it on a GPU"),
        ((FIRST,), (), f"does not list process {FIRST.identity.pid}"),
        ((FIRST, SECOND), (FIRST.identity.pid,), f"does not list process {SECOND.identity.pid}"),
        ((), (), "no other process of the workload does"),
    ],
    ids=["listed", "none is listed", "too few are listed", "no member"],
)
def test_a_process_that_can_not_be_traced_and_may_be_a_member_is_refused(
    members: tuple[Member, ...], listed: tuple[int, ...], why: str
) -> None:
    with pytest.raises(OperationError, match=why) as raised:
        require_open(Search(members, (CLOSED,)), listing(*listed))
    assert raised.value.reason == errors_pb2.ERROR_REASON_PERMISSION_OR_OS
    assert raised.value.metadata == {"pid": str(CLOSED.pid)}
    assert "CAP_SYS_PTRACE" in raised.value.message


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
    workload = workload_of(CLOSED)
    workload.state = workload_pb2.WorkloadState.ValueType(state)
    with pytest.raises(OperationError) as raised:
        require_state(workload, (workload_pb2.WORKLOAD_STATE_SUSPENDED,), "restored")
    name = workload_pb2.WorkloadState.Name(workload.state).removeprefix("WORKLOAD_STATE_")
    assert raised.value.message == (f"workload w-1 is {name}, and must be SUSPENDED to be restored: {remedy}")


@pytest.mark.parametrize(
    ("state", "remedy"),
    [(LOCKED, "let its debugger or shell resume it"), (FAILED, "stop the workload")],
    ids=["locked", "failed"],
)
def test_a_member_in_a_wrong_state_is_told_with_its_remedy(state: int, remedy: str) -> None:
    member = replace(FIRST, state=workload_pb2.MemberState.ValueType(state))
    with pytest.raises(OperationError, match=remedy) as raised:
        require_members(workload_of(CLOSED), [member])
    assert raised.value.reason == errors_pb2.ERROR_REASON_WRONG_STATE
