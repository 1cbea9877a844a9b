"""What must hold before an operation begins."""

import os

import pytest
from leasehold.v1 import errors_pb2
from leasehold_worker.checkpoint.members import RUNNING, Member, Search
from leasehold_worker.errors import OperationError
from leasehold_worker.gpu_facts import GpuUsage
from leasehold_worker.preconditions import require_open
from leasehold_worker.processes import Pid, ProcessIdentity

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
