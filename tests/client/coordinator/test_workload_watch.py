"""Waiting until a workload is ready, or has ended."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    errors_pb2,
    watch_pb2,
    workload_pb2,
    workload_service_pb2,
)
from leasehold.v1.command_pb2 import Command
from leasehold.v1.workload_pb2 import Workload, WorkloadStatus
from leasehold_client import Client, LeaseholdError, WaitTimeoutError
from leasehold_client.errors import NoCoordinatorError

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

SUCCEEDED, REJECTED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_REJECTED
NOT_READY = errors_pb2.Error(
    reason=errors_pb2.ERROR_REASON_NOT_READY,
    message="workload one is not ready",
    metadata={"workload_id": "id-of-one"},
)


def starting() -> Workload:
    """A workload that runs and is not ready."""
    found = workload()
    found.status.ClearField("ready_time")
    return found


def ended() -> Workload:
    found = starting()
    found.status.state = workload_pb2.WORKLOAD_STATE_EXITED
    found.status.exit.code = 3
    return found


def tells(scripted: ScriptedCoordinator, *changes: Workload) -> None:
    """A watch tells these changes, and then is silent until the caller ends it."""

    def watch(_: Any, context: grpc.ServicerContext) -> Iterator[workload_service_pb2.WatchWorkloadsResponse]:
        over = threading.Event()
        context.add_callback(over.set)
        for number, change in enumerate(changes):
            yield workload_service_pb2.WatchWorkloadsResponse(workload=change)
            if not number:
                yield workload_service_pb2.WatchWorkloadsResponse(
                    bookmark=watch_pb2.Bookmark(snapshot_end=True)
                )
        over.wait(20)

    scripted.answers["GetWorkload"] = lambda request, _: workload_service_pb2.GetWorkloadResponse(
        workload=changes[0]
    )
    scripted.answers["WatchWorkloads"] = watch


def test_a_workload_is_waited_for_until_it_is_ready(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    tells(scripted, starting(), workload())
    done = leasehold("wait", "one", "--for", "ready")
    assert (done.code, done.stdout, done.stderr) == (0, "one: ready\n", "")
    [request] = scripted.asked(workload_service_pb2.WatchWorkloadsRequest)
    assert request.workload == "id-of-one"
    shown = json.loads(leasehold("wait", "one", "-o", "json").stdout)
    assert shown["status"]["ready_time"].startswith("2027-")


def test_a_workload_that_ends_before_it_is_ready_ends_the_wait(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    tells(scripted, starting(), ended())
    done = leasehold("wait", "one")
    assert done.code == 1
    assert done.stderr == (
        "leasehold: workload one is EXITED: it ended before it was ready; `leasehold logs one` shows its "
        "output (WRONG_STATE)\n"
    )
    done = leasehold("wait", "one", "--for", "ended")
    assert (done.code, done.stdout) == (0, "one: EXITED(3)\n")


def test_a_wait_for_a_workload_that_has_ended_tells_that_it_was_ready(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    finished = workload()
    finished.status.state = workload_pb2.WORKLOAD_STATE_EXITED
    tells(scripted, finished)
    done = leasehold("wait", "one", "--timeout", "0")
    assert done.code == 1
    assert done.stderr == (
        "leasehold: workload one is EXITED: it was ready, and has ended since; `leasehold logs one` shows "
        "its output (WRONG_STATE)\n"
    )
    suspended = leasehold("wait", "one", "--for", "state=SUSPENDED")
    assert (suspended.code, "it ended before it was SUSPENDED" in suspended.stderr) == (1, True)


def test_a_wait_for_a_program_that_was_never_started_tells_why(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    failed = workload()
    failed.status.CopyFrom(WorkloadStatus(state=workload_pb2.WORKLOAD_STATE_FAILED))
    failed.status.error.message = "'x' could not be started: No such file"
    tells(scripted, failed)
    done = leasehold("wait", "one")
    assert done.code == 1
    assert done.stderr == (
        "leasehold: workload one is FAILED: it ended before it was ready; its program was never started: 'x' "
        "could not be started: No such file (WRONG_STATE)\n"
    )


def test_a_wait_has_its_time(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    tells(scripted, starting())
    done = leasehold("wait", "one", "--timeout", "0.2")
    assert done.code == 4
    assert done.stderr.startswith("leasehold: workload one has not become ready within 0.2 s; it continues")
    with Client(scripted.address) as client, pytest.raises(WaitTimeoutError):
        client.wait_workload("one", "ended", timeout_s=0)
    parked = workload()
    parked.status.state = workload_pb2.WORKLOAD_STATE_SUSPENDED
    tells(scripted, parked)
    assert leasehold("wait", "one", "--timeout", "0").stderr == (
        "leasehold: workload one is SUSPENDED, and was not restored within 0 s: `leasehold restore one`\n"
    )


def test_a_wait_tells_that_the_worker_is_out_of_contact(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    silent = workload()
    silent.out_of_contact = True
    silent.create_time.FromSeconds(1_799_999_999)
    silent.report_time.FromSeconds(1_800_000_000)
    tells(scripted, workload(), silent)
    assert leasehold("wait", "one", "--for", "ended", "--timeout", "0.5").stderr == (
        "leasehold: workload one has not ended within 0.5 s: its worker is out of contact, and the last "
        "known state is RUNNING(as of 2027-01-15T08:00:00Z); `leasehold get workers` shows the worker\n"
    )
    tells(scripted, silent)
    assert leasehold("wait", "one").stdout == "one: RUNNING(as of 2027-01-15T08:00:00Z)\n"


def test_a_wait_outlives_its_coordinator(scripted: ScriptedCoordinator) -> None:
    tells(scripted, starting())

    def watch(_: Any, context: grpc.ServicerContext) -> Iterator[workload_service_pb2.WatchWorkloadsResponse]:
        first = len(scripted.asked(workload_service_pb2.WatchWorkloadsRequest)) == 1
        yield workload_service_pb2.WatchWorkloadsResponse(workload=starting() if first else workload())
        if first:
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    scripted.answers["WatchWorkloads"] = watch
    with Client(scripted.address) as client:
        assert client.wait_workload("one", timeout_s=20).status.HasField("ready_time")


@pytest.mark.usefixtures("short_outages")
def test_a_coordinator_that_ends_each_watch_early_is_given_up(scripted: ScriptedCoordinator) -> None:
    tells(scripted, starting())

    def watch(_: Any, context: grpc.ServicerContext) -> Iterator[workload_service_pb2.WatchWorkloadsResponse]:
        yield workload_service_pb2.WatchWorkloadsResponse(workload=starting())
        context.abort(grpc.StatusCode.UNAVAILABLE, "cut")

    scripted.answers["WatchWorkloads"] = watch
    with Client(scripted.address) as client, pytest.raises(NoCoordinatorError):
        client.wait_workload("one")


def test_a_workload_that_is_released_is_no_reason_to_wait(scripted: ScriptedCoordinator) -> None:
    released = starting()
    released.status.state = workload_pb2.WORKLOAD_STATE_RELEASED
    tells(scripted, released)
    with Client(scripted.address) as client, pytest.raises(LeaseholdError, match="is RELEASED"):
        client.wait_workload("one")


def rejected_first(scripted: ScriptedCoordinator) -> None:
    """The first suspend is rejected because the workload is not ready; the second one succeeds."""

    def suspend(_: Any, __: grpc.ServicerContext) -> workload_service_pb2.SuspendWorkloadResponse:
        number = len(scripted.asked(workload_service_pb2.SuspendWorkloadRequest))
        return workload_service_pb2.SuspendWorkloadResponse(command=Command(command_id=f"c-{number}"))

    def watch(request: Any, _: grpc.ServicerContext) -> Iterator[command_service_pb2.WatchCommandResponse]:
        first = request.command_id == "c-1"
        told = command(REJECTED, error=NOT_READY) if first else command(SUCCEEDED)
        told.command_id = request.command_id
        yield command_service_pb2.WatchCommandResponse(command=told)

    scripted.answers["SuspendWorkload"] = suspend
    scripted.answers["WatchCommand"] = watch


def test_a_suspend_waits_until_the_workload_is_ready(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    tells(scripted, starting(), workload())
    rejected_first(scripted)
    done = leasehold("suspend", "one")
    told = f"leasehold: workload one is not ready: waiting\n  {NOT_READY.message}\n"
    assert (done.code, done.stderr) == (0, told)
    assert "one: suspend done" in done.stdout
    first, second = scripted.asked(workload_service_pb2.SuspendWorkloadRequest)
    assert first.request_id != second.request_id


@pytest.mark.parametrize("ends", [True, False], ids=["ends", "hangs"])
def test_a_workload_that_is_never_ready_hides_no_outcome_of_others(
    leasehold: CommandLine, scripted: ScriptedCoordinator, ends: bool
) -> None:
    tells(scripted, starting(), *([ended()] if ends else []))
    rejected_first(scripted)
    for output in ([], ["-o", "json"], ["-q"]):
        scripted.requests.clear()
        done = leasehold("suspend", "never", "one", "two", "--wait-timeout", "0.6", *output)
        assert done.code == (1 if ends else 4)
        last = done.stderr.splitlines()[-1]
        assert last.startswith("leasehold: never: workload ")
        assert ("it ended before it was ready" if ends else "has not become ready within") in last
        assert ("is not ready: waiting" in done.stderr) == (output != ["-q"])
        if output == ["-o", "json"]:
            states = [one["state"] for one in json.loads(done.stdout)["commands"]]
            assert states == ["COMMAND_STATE_REJECTED", "COMMAND_STATE_SUCCEEDED", "COMMAND_STATE_SUCCEEDED"]
        else:
            told = [line.partition(":")[0] for line in done.stdout.splitlines() if line.endswith(" done")]
            assert told == ([] if output else ["one", "two"])


def test_a_suspend_waits_no_longer_than_it_may(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    tells(scripted, starting())
    rejected_first(scripted)
    done = leasehold("suspend", "one", "--wait-timeout", "0.6")
    assert done.code == 4
    assert "has not become ready" in done.stderr
    scripted.requests.clear()
    document = json.loads(leasehold("suspend", "one", "--wait-timeout", "0.6", "-o", "json").stdout)
    assert document["state"] == "COMMAND_STATE_REJECTED"
    scripted.requests.clear()
    assert leasehold("suspend", "one", "--no-wait").code == 0
    assert len(scripted.asked(workload_service_pb2.SuspendWorkloadRequest)) == 1


def test_run_can_wait_until_the_workload_is_ready(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    tells(scripted, starting(), workload())
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, _: workload_service_pb2.CreateWorkloadResponse(
        workload=starting(), command=command(SUCCEEDED)
    )
    done = leasehold("run", "--wait-ready", "--", "true")
    assert done.code == 0
    assert done.stdout.splitlines()[-1] == "one: ready"
    assert (
        json.loads(leasehold("run", "--wait-ready", "-o", "json", "--", "true").stdout)["command_id"] == "c-1"
    )
    done = leasehold("run", "--wait-ready", "--no-wait", "--", "true")
    assert done.code == 2
    assert "exclude each other" in done.stderr


def test_get_shows_what_is_not_ready(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListWorkloads"] = lambda request, _: workload_service_pb2.ListWorkloadsResponse(
        workloads=[workload(), starting()]
    )
    _, ready, not_ready = leasehold("get", "workloads").stdout.splitlines()
    assert ready.split()[1] == "RUNNING"
    assert "RUNNING(not ready)" in not_ready
