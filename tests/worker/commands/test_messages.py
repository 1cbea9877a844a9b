"""What fits into a frame."""

from leasehold.v1 import command_pb2, errors_pb2
from leasehold.v1.command_pb2 import CommandResult, MemberOutcome
from leasehold.v1.errors_pb2 import Error
from leasehold.v1.workload_pb2 import Member, Workload, WorkloadSpec, WorkloadStatus
from leasehold.worker.v1.session_pb2 import CommandUpdate
from leasehold_worker.commands.messages import UPDATE_LIMIT_BYTES, fitting


def outcome(*, spec: int = 0, members: int = 0, member_outcomes: int = 0, message: int = 10) -> CommandUpdate:
    status = WorkloadStatus(generation=7, members=[Member(pid=2**20, start_time_ticks=2**40)] * members)
    return CommandUpdate(
        command_id="c1",
        state=command_pb2.COMMAND_STATE_FAILED,
        error=Error(reason=errors_pb2.ERROR_REASON_DRIVER_ERROR, message="x" * message),
        result=CommandResult(
            driver_version="580", members=[MemberOutcome(pid=2**20, workload_id="w1")] * member_outcomes
        ),
        workloads=[
            Workload(workload_id="w1", spec=WorkloadSpec(arguments=["x" * spec]), status=status),
            Workload(workload_id="w2", status=status),
        ],
    )


def test_what_fits_is_told_whole() -> None:
    update = outcome(spec=100_000, members=10, member_outcomes=10)
    assert fitting(update) == update


def test_the_least_needed_goes_first() -> None:
    fitted = fitting(outcome(spec=200_000, members=10, member_outcomes=10))
    assert not fitted.workloads[0].HasField("spec")
    assert len(fitted.workloads[1].status.members) == len(fitted.result.members) == 10
    fitted = fitting(outcome(members=10_000, member_outcomes=10))
    assert [(w.status.generation, len(w.status.members)) for w in fitted.workloads] == [(7, 0), (7, 0)]
    assert len(fitted.result.members) == 10
    fitted = fitting(outcome(members=10_000, member_outcomes=20_000))
    assert not fitted.result.members
    assert fitted.result.driver_version == "580"
    assert "too large to report" in fitted.result.warnings[0]


def test_the_outcome_itself_always_fits() -> None:
    fitted = fitting(outcome(message=1_000_000))
    assert fitted.ByteSize() < UPDATE_LIMIT_BYTES
    assert fitted.state == command_pb2.COMMAND_STATE_FAILED
    assert fitted.error.reason == errors_pb2.ERROR_REASON_DRIVER_ERROR
    assert fitted.error.message
