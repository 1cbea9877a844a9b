"""``leasehold wait``: conditions, several workloads, and what is refused."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator

import grpc
import pytest
from leasehold.v1 import workload_pb2
from leasehold.v1.workload_service_pb2 import (
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    WatchWorkloadsRequest,
    WatchWorkloadsResponse,
)

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse, workload

TIMEOUT_S = 30.0
RUNNING, SUSPENDED = workload_pb2.WORKLOAD_STATE_RUNNING, workload_pb2.WORKLOAD_STATE_SUSPENDED


@pytest.fixture
def moving(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """Each workload runs, is suspended, and fails."""

    def watch(request: WatchWorkloadsRequest, context: object) -> Iterator[WatchWorkloadsResponse]:
        for state in (RUNNING, SUSPENDED, workload_pb2.WORKLOAD_STATE_FAILED):
            shown = workload("one")
            shown.status.state = state
            yield WatchWorkloadsResponse(workload=shown)

    scripted.answers["WatchWorkloads"] = watch
    return scripted


@pytest.mark.parametrize(
    ("condition", "line"),
    [
        ("ready", "ready"),
        ("ended", "FAILED"),
        ("state=RUNNING", "RUNNING"),
        ("state=suspended", "SUSPENDED"),
        ("state=FAILED", "FAILED"),
    ],
)
def test_the_wait_ends_when_the_condition_holds(
    leasehold: CommandLine, moving: ScriptedCoordinator, condition: str, line: str
) -> None:
    done = leasehold("wait", "one", f"--for={condition}")
    assert (done.code, done.stdout, done.stderr) == (0, f"one: {line}\n", "")


def test_a_workload_that_ends_before_is_a_failure(
    leasehold: CommandLine, moving: ScriptedCoordinator
) -> None:
    done = leasehold("wait", "one", "--for=state=CHECKPOINTED")
    assert (done.code, done.stdout) == (1, "")
    assert "workload one is FAILED: it ended before it was CHECKPOINTED" in done.stderr


def test_several_are_waited_for(leasehold: CommandLine, moving: ScriptedCoordinator) -> None:
    assert leasehold("wait", "one", "two").stdout == "one: ready\ntwo: ready\n"
    document = json.loads(leasehold("wait", "one", "two", "-o", "json").stdout)
    assert len(document["workloads"]) == 2
    assert json.loads(leasehold("wait", "one", "-o", "json").stdout)["name"] == "one"


def test_an_unknown_name_is_refused_before_the_first_wait(
    leasehold: CommandLine, moving: ScriptedCoordinator
) -> None:
    find = moving.answers["GetWorkload"]
    moving.answers["GetWorkload"] = lambda request, context: (
        refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload is named tarin")
        if request.workload == "tarin"
        else find(request, context)
    )
    assert "no workload is named tarin" in leasehold("wait", "one", "tarin").stderr
    assert not moving.asked(WatchWorkloadsRequest)


@pytest.mark.parametrize(
    ("condition", "match"),
    [
        ("done", "'done' is not a condition: write ready, ended, or state=RUNNING"),
        ("state=", "is not a condition"),
        ("state=DONE", "'DONE' is not a state of workloads: choose PENDING, RUNNING, "),
    ],
)
def test_bad_usage(leasehold: CommandLine, moving: ScriptedCoordinator, condition: str, match: str) -> None:
    done = leasehold("wait", "one", "--for", condition)
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr
    assert not moving.asked(WatchWorkloadsRequest)


@pytest.mark.parametrize("condition", ["ready", "ended", "state=SUSPENDED", "state=FAILED"])
def test_a_search_that_finds_nothing_is_a_failure(
    leasehold: CommandLine, moving: ScriptedCoordinator, condition: str
) -> None:
    moving.answers["ListWorkloads"] = lambda request, context: ListWorkloadsResponse()
    done = leasehold("wait", "-l", "job=9", f"--for={condition}")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr.startswith("leasehold: no workload matches, so there is nothing to wait for: ")


def test_a_search_that_times_out_names_the_workload(
    leasehold: CommandLine, moving: ScriptedCoordinator
) -> None:
    def watch(
        request: WatchWorkloadsRequest, context: grpc.ServicerContext
    ) -> Iterator[WatchWorkloadsResponse]:
        yield WatchWorkloadsResponse(workload=workload("one"))
        while context.is_active():
            time.sleep(0.01)

    moving.answers["WatchWorkloads"] = watch
    moving.answers["ListWorkloads"] = lambda request, context: ListWorkloadsResponse(
        workloads=[workload("one")]
    )
    done = leasehold("wait", "-l", "job=9", "--for=state=SUSPENDED", "--timeout", "0.2")
    assert done.code == 4
    assert done.stderr.startswith("leasehold: workload one has not become SUSPENDED within 0.2 s")


def test_a_timeout_of_zero_looks_once(leasehold: CommandLine, moving: ScriptedCoordinator) -> None:
    def watch(
        request: WatchWorkloadsRequest, context: grpc.ServicerContext
    ) -> Iterator[WatchWorkloadsResponse]:
        yield WatchWorkloadsResponse(workload=workload(request.workload))
        while context.is_active():
            time.sleep(0.01)

    moving.answers["WatchWorkloads"] = watch
    done = leasehold("wait", "one", "two", "--for=state=RUNNING", "--timeout", "0")
    assert (done.code, done.stdout) == (0, "one: RUNNING\ntwo: RUNNING\n")
    done = leasehold("wait", "one", "--for=ended", "--timeout", "0")
    assert done.code == 4
    assert "has not ended within 0 s; it continues (RUNNING)" in done.stderr
    done = leasehold("wait", "one", "two", "three", "--for=ended", "--timeout", "0")
    assert done.stderr.endswith("; not looked at: two, three\n")


def test_workloads_that_have_all_ended_are_no_failure(
    leasehold: CommandLine, moving: ScriptedCoordinator
) -> None:
    ended = workload("one")
    ended.status.state = workload_pb2.WORKLOAD_STATE_FAILED

    def listed(request: ListWorkloadsRequest, context: object) -> ListWorkloadsResponse:
        return ListWorkloadsResponse(workloads=[ended] if request.include_ended else [])

    moving.answers["ListWorkloads"] = listed
    for condition in ("ended", "state=FAILED"):
        done = leasehold("wait", "-l", "job=9", f"--for={condition}")
        assert (done.code, done.stderr) == (0, "leasehold: all workloads that match have ended\n")
    for condition, hope in (("state=EXITED", "EXITED"), ("ready", "ready")):
        done = leasehold("wait", "-l", "job=9", f"--for={condition}")
        assert done.code == 1
        assert done.stderr.startswith(
            f"leasehold: all workloads that match have ended, so none becomes {hope}: one (FAILED)"
        )


def test_a_search_names_the_workloads_that_failed_before(
    leasehold: CommandLine, moving: ScriptedCoordinator
) -> None:
    def listed(request: ListWorkloadsRequest, context: object) -> ListWorkloadsResponse:
        names = ("one", "old") if "state = FAILED" in request.filter else ("one",)
        return ListWorkloadsResponse(workloads=[workload(name) for name in names])

    moving.answers["ListWorkloads"] = listed
    done = leasehold("wait", "-l", "job=9")
    assert (done.code, done.stdout) == (0, "one: ready\n")
    assert done.stderr == "leasehold: workloads that match and FAILED before: old\n"
    assert leasehold("wait", "--all").stderr == ""


def interrupt(request: object, context: grpc.ServicerContext) -> Iterator[WatchWorkloadsResponse]:
    """Sends SIGINT to this process, and answers nothing until the caller has gone."""
    os.kill(os.getpid(), signal.SIGINT)
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(TIMEOUT_S)
    yield from ()


def test_ctrl_c_names_no_command_that_is_not_there(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["WatchWorkloads"] = interrupt
    done = leasehold("wait", "one")
    assert done.code == 130
    assert done.stderr == (
        "leasehold: interrupted; one continues: `leasehold get workloads` shows its state\n"
    )
    scripted.answers["ListWorkloads"] = lambda request, context: [*interrupt(request, context)]
    done = leasehold("get", "workloads")
    assert (done.code, done.stderr) == (130, "leasehold: interrupted\n")


def test_ctrl_c_tells_that_a_command_may_continue(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: [*interrupt(request, context)]
    done = leasehold("suspend", "one")
    assert done.code == 130
    assert done.stderr.startswith("leasehold: interrupted; a command that was stored continues")
