"""Outcomes of commands: what was moved, and why a command failed."""

import json
from typing import Any

from google.protobuf import duration_pb2
from leasehold.v1 import command_pb2, errors_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import CommandResult, MemberOutcome, PhaseTiming
from leasehold.v1.gpu_pb2 import GpuPair
from leasehold_client.display.outcome import timing_line

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, B, C, ScriptedCoordinator, command

PENDING, RUNNING = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_RUNNING


SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED


RESULT = CommandResult(
    duration=duration_pb2.Duration(seconds=2),
    phases=[
        PhaseTiming(phase="lock", duration=duration_pb2.Duration(nanos=1_000_000)),
        PhaseTiming(
            phase="checkpoint", duration=duration_pb2.Duration(nanos=500_000_000), moved_bytes=3 * 2**29
        ),
        PhaseTiming(phase="verify", duration=duration_pb2.Duration(nanos=20_400_000)),
    ],
    warnings=["the driver is old"],
    released_gpu_uuids=[A],
    claimed_gpu_uuids=[B],
    applied_pairs=[GpuPair(old_uuid=A, new_uuid=B), GpuPair(old_uuid=C, new_uuid=C)],
    members=[
        MemberOutcome(
            pid=42,
            phases=[PhaseTiming(phase="lock", duration=duration_pb2.Duration(seconds=1), moved_bytes=2**20)],
        )
    ],
)


def test_an_unknown_duration_is_not_zero(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    unknown = CommandResult(warnings=["the worker restarted during the command and found it complete"])
    scripted.plays(command(PENDING), command(SUCCEEDED, 2, result=unknown))
    assert leasehold("suspend", "one").stdout.splitlines()[0] == "one: suspend done"


def test_a_command_that_succeeds_tells_what_moved(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.plays(command(PENDING), command(RUNNING, 2), command(SUCCEEDED, 3, result=RESULT))
    done = leasehold("suspend", "one", "--timeout", "1.5")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "one: suspend done in 2.00 s",
        "  lock 1 ms (1.0 MiB, 1000.0 MiB/s), checkpoint 0.5 s (1.5 GiB, 3.0 GiB/s), verify 20 ms",
        "  released alpha/0",
        "  claimed alpha/1",
        "  pair alpha/0 -> alpha/1",
        "  pid 42: lock 1.00 s (1.0 MiB)",
        "  warning: the driver is old",
    ]
    [request] = scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
    assert request.workload == "one"
    assert request.timeout.ToMilliseconds() == 1500


def test_phases_that_failed_or_undid_something_say_so() -> None:
    second = duration_pb2.Duration(seconds=1)
    phases = [
        PhaseTiming(phase="restore", duration=second, failed=True),
        PhaseTiming(phase="restore", duration=second, rollback=True),
        PhaseTiming(phase="rollback", duration=second, rollback=True, moved_bytes=2**30),
        PhaseTiming(phase="verify", moved_bytes=5),
    ]
    assert timing_line(CommandResult(phases=phases)) == (
        "restore FAILED after 1.0 s, undoing restore 1.0 s, rollback 1.0 s (1.0 GiB, 1.0 GiB/s), verify 0 ms"
    )
    assert timing_line(CommandResult()) == ""


def test_a_command_that_fails_tells_of_each_member(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    members = [
        MemberOutcome(
            pid=42,
            state_before=workload_pb2.MEMBER_STATE_RUNNING,
            state_after=workload_pb2.MEMBER_STATE_RUNNING,
            rolled_back=True,
            error=errors_pb2.Error(message="it did not drain\nleasehold: done"),
        ),
        MemberOutcome(pid=43, state_after=workload_pb2.MEMBER_STATE_WEDGED, rolled_back=False),
        MemberOutcome(pid=44, error=errors_pb2.Error(message="pid 42 is busy")),
    ]
    error = errors_pb2.Error(reason=errors_pb2.ERROR_REASON_LOCK_TIMEOUT, message="pid 42 is busy")
    result = CommandResult(members=members, warnings=["look at pid 43"])
    scripted.plays(command(FAILED, result=result, error=error))
    done = leasehold("suspend", "one")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "leasehold: suspend FAILED: pid 42 is busy (LOCK_TIMEOUT)",
        "  pid 42: RUNNING -> RUNNING, rolled back: it did not drain\\nleasehold: done",
        "  pid 43: UNSPECIFIED -> WEDGED, NOT rolled back",
        "  pid 44: UNSPECIFIED -> UNSPECIFIED",
        "  warning: look at pid 43",
    ]
    done = leasehold("suspend", "one", "-o", "json")
    assert done.code == 1
    assert json.loads(done.stdout)["error"]["reason"] == "ERROR_REASON_LOCK_TIMEOUT"
    assert "LOCK_TIMEOUT" in done.stderr


def test_a_reason_of_a_newer_coordinator_shows_its_number(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    newer: Any = 4711
    scripted.plays(command(FAILED, error=errors_pb2.Error(reason=newer, message="something new")))
    assert leasehold("suspend", "one").stderr == "leasehold: suspend FAILED: something new (4711)\n"
