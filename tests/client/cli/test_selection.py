"""Several workloads at once: by names, labels, a filter, or all."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from leasehold.v1 import command_pb2, workload_pb2
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import (
    GetCommandRequest,
    GetCommandResponse,
    WatchCommandRequest,
    WatchCommandResponse,
)
from leasehold.v1.operation_pb2 import Operation, StopOperation, SuspendOperation
from leasehold.v1.plan_pb2 import Plan
from leasehold.v1.workload_service_pb2 import (
    ListWorkloadsRequest,
    ListWorkloadsResponse,
    PlanRequest,
    PlanResponse,
    StopWorkloadRequest,
    StopWorkloadResponse,
    SuspendWorkerRequest,
    SuspendWorkloadRequest,
    SuspendWorkloadResponse,
)

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse, workload

PENDING, SUCCEEDED = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_SUCCEEDED
TIMEOUT_S = 30.0


@pytest.fixture
def fleet(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """Workloads one and two, which hold GPUs, and three, which is suspended. Each command succeeds."""
    parked = workload("three")
    parked.status.state = workload_pb2.WORKLOAD_STATE_SUSPENDED
    parked.status.ClearField("lease")
    made: dict[str, Command] = {}

    def create(name: str, operation: Operation) -> Command:
        command = Command(command_id=f"c-{name}", state=PENDING, revision=1, operation=operation)
        made[command.command_id] = command
        return command

    def suspend(request: SuspendWorkloadRequest, context: object) -> SuspendWorkloadResponse:
        return SuspendWorkloadResponse(
            command=create(request.workload, Operation(suspend=SuspendOperation()))
        )

    def stop(request: StopWorkloadRequest, context: object) -> StopWorkloadResponse:
        return StopWorkloadResponse(command=create(request.workload, Operation(stop=StopOperation())))

    def watch(request: WatchCommandRequest, context: object) -> Iterator[WatchCommandResponse]:
        command = made[request.command_id]
        command.state, command.revision = SUCCEEDED, 2
        yield WatchCommandResponse(command=command)

    scripted.answers |= {
        "ListWorkloads": lambda request, context: ListWorkloadsResponse(
            workloads=[workload("one"), workload("two"), parked]
        ),
        "SuspendWorkload": suspend,
        "StopWorkload": stop,
        "WatchCommand": watch,
    }
    return scripted


def test_several_names_are_several_commands(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    done = leasehold("suspend", "one", "two", "one")
    assert (done.code, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")] == [
        "one: suspend done",
        "two: suspend done",
    ]
    assert [request.workload for request in fleet.asked(SuspendWorkloadRequest)] == ["one", "two"]
    document = json.loads(leasehold("suspend", "one", "two", "-o", "json").stdout)
    assert [command["command_id"] for command in document["commands"]] == ["c-one", "c-two"]


def test_a_refusal_names_its_workload_and_does_not_stop_the_others(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    import grpc

    suspend = fleet.answers["SuspendWorkload"]

    def answer(request: SuspendWorkloadRequest, context: grpc.ServicerContext) -> object:
        if request.workload == "one":
            refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE", "it is EXITED")
        return suspend(request, context)

    fleet.answers["SuspendWorkload"] = answer
    done = leasehold("suspend", "one", "two")
    assert done.code == 1
    assert done.stdout.startswith("two: suspend done")
    assert done.stderr == "leasehold: one: it is EXITED (WRONG_STATE)\n"


@pytest.mark.parametrize(
    ("options", "filter_text"),
    [
        (["--all"], ""),
        (["-l", "team=a"], 'labels."team" = "a"'),
        (["--filter", "state = RUNNING"], "state = RUNNING"),
        (["-l", "team", "--filter", "priority > 1"], 'priority > 1 AND labels:"team"'),
    ],
)
def test_a_search_finds_what_the_verb_applies_to(
    leasehold: CommandLine, fleet: ScriptedCoordinator, options: list[str], filter_text: str
) -> None:
    done = leasehold("suspend", *options)
    assert (done.code, done.stderr) == (0, "")
    assert [request.workload for request in fleet.asked(SuspendWorkloadRequest)] == ["id-of-one", "id-of-two"]
    assert fleet.asked(ListWorkloadsRequest)[0].filter == filter_text


def test_a_search_that_finds_nothing_says_so(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    fleet.answers["ListWorkloads"] = lambda request, context: ListWorkloadsResponse()
    for verb in ("suspend", "restore", "stop", "checkpoint"):
        done = leasehold(verb, "--all")
        assert (done.code, done.stdout) == (0, "")
        assert done.stderr == "leasehold: no workload matches, so nothing was done\n"


@pytest.mark.parametrize("found", [[], ["one"], ["one", "two"]], ids=["none", "one", "two"])
def test_the_document_of_a_search_is_a_list(
    leasehold: CommandLine, fleet: ScriptedCoordinator, found: list[str]
) -> None:
    listed = [workload(name) for name in found]
    fleet.answers["ListWorkloads"] = lambda request, context: ListWorkloadsResponse(workloads=listed)
    fleet.answers["Plan"] = lambda request, context: PlanResponse(plan=Plan())
    for verb in (["suspend"], ["stop", "--yes"]):
        done = leasehold(*verb, "--all", "-o", "json")
        assert done.code == 0
        assert len(json.loads(done.stdout)["commands"]) == len(found)
    fleet.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE", "it is SUSPENDED"
    )
    assert json.loads(leasehold("suspend", "--all", "-o", "json").stdout) == {"commands": []}
    done = leasehold("suspend", "--all", "--dry-run", "-o", "json")
    assert (done.code, len(json.loads(done.stdout)["plans"])) == (0, len(found))


def test_a_search_that_destroys_needs_a_yes(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    done = leasehold("stop", "--all")
    assert done.code == 2
    assert done.stderr == "leasehold: stop one, two, three: without a terminal, answer with --yes\n"
    assert not fleet.asked(StopWorkloadRequest)
    assert leasehold("stop", "--all", "--yes", "-q").stdout == ""
    assert len(fleet.asked(StopWorkloadRequest)) == 3


@pytest.mark.parametrize("verb", ["suspend", "restore", "stop", "checkpoint", "rm workload", "wait"])
def test_names_and_a_search_exclude_each_other(leasehold: CommandLine, verb: str) -> None:
    done = leasehold(*verb.split(), "one", "--all")
    assert (done.code, done.stderr) == (2, "leasehold: leave out 'one', or -l, --filter and --all\n")
    assert leasehold(*verb.split()).code == 2
    assert "invalid selector" in leasehold(*verb.split(), "-l", "a=b=c").stderr


def test_options_of_one_workload_are_refused_for_several(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    assert "are for one workload" in leasehold("restore", "one", "two", "--to", "alpha/0").stderr
    assert "--worker suspends everything" in leasehold("suspend", "one", "--worker", "alpha").stderr


def test_plans_of_several_are_printed_in_turn(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    fleet.answers["Plan"] = lambda request, context: PlanResponse(plan=Plan())
    done = leasehold("suspend", "one", "two", "--dry-run")
    assert done.stdout.splitlines() == ["one: suspend would start", "two: suspend would start"]
    document = json.loads(leasehold("suspend", "one", "two", "--dry-run", "-o", "json").stdout)
    assert len(document["plans"]) == 2
    assert len(fleet.asked(PlanRequest)) == 4
    assert not fleet.asked(SuspendWorkloadRequest)


def test_quiet_prints_only_ids(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    assert leasehold("suspend", "one", "-q").stdout == ""
    assert leasehold("suspend", "one", "-q", "--no-wait").stdout == "c-one\n"
    assert leasehold("suspend", "one", "two", "-q", "--no-wait").stdout == "c-one\nc-two\n"


@pytest.mark.usefixtures("short_outages")
@pytest.mark.parametrize("is_created", [True, False])
def test_an_outage_tells_the_outcomes_so_far_and_the_open_commands(
    leasehold: CommandLine, fleet: ScriptedCoordinator, is_created: bool
) -> None:
    """It comes while the commands are created, or while they are waited for."""
    method = "WatchCommand" if is_created else "SuspendWorkload"
    answer = fleet.answers[method]

    def gone(request: Any, context: grpc.ServicerContext) -> Any:
        if "two" in str(request):
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return answer(request, context)

    fleet.answers[method] = gone
    done = leasehold("suspend", "one", "two", "four", "-o", "json")
    names = ["c-two", "c-four"] if is_created else ["c-one"]
    states = ["SUCCEEDED", "PENDING", "PENDING"] if is_created else ["PENDING"]
    told = [one["state"] for one in json.loads(done.stdout)["commands"]]
    assert told == [f"COMMAND_STATE_{state}" for state in states]
    assert done.code == 3
    assert f"`leasehold get commands {' '.join(names)}` shows" in done.stderr
    left = "; the request for two may have arrived, and nothing was requested for four"
    assert (left in done.stderr) == (not is_created)


@pytest.mark.usefixtures("short_outages")
def test_a_suspend_of_a_worker_that_may_be_stored_is_not_repeated(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    """The second one would find the workloads that the first one has left."""
    fleet.answers["SuspendWorker"] = lambda request, context: context.abort(
        grpc.StatusCode.UNAVAILABLE, "gone"
    )
    done = leasehold("suspend", "--worker", "alpha")
    assert done.code == 3
    assert "the command may have been stored: `leasehold get commands` shows it" in done.stderr
    assert len(fleet.asked(SuspendWorkerRequest)) == 1


def test_a_line_names_its_workload_also_if_its_name_is_a_part_of_a_word(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    fleet.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE", "none of its processes uses CUDA"
    )
    assert leasehold("suspend", "one", "two").stderr.splitlines() == [
        f"leasehold: {name}: none of its processes uses CUDA (WRONG_STATE)" for name in ("one", "two")
    ]


@pytest.mark.parametrize("is_answered", [True, False])
def test_ctrl_c_tells_the_outcomes_so_far_and_the_open_commands(
    leasehold: CommandLine, fleet: ScriptedCoordinator, is_answered: bool
) -> None:
    left = threading.Event()
    known_watch = fleet.answers["WatchCommand"]

    def watch(request: WatchCommandRequest, context: grpc.ServicerContext) -> Iterator[WatchCommandResponse]:
        if request.command_id != "c-two":
            yield from known_watch(request, context)
            return
        os.kill(os.getpid(), signal.SIGINT)
        context.add_callback(left.set)
        left.wait(TIMEOUT_S)

    def get(request: GetCommandRequest, context: grpc.ServicerContext) -> GetCommandResponse:
        if not is_answered:
            context.abort(grpc.StatusCode.INTERNAL, "out of order")
        state = SUCCEEDED if request.command_id == "c-four" else PENDING
        suspend = Operation(suspend=SuspendOperation())
        return GetCommandResponse(
            command=Command(command_id=request.command_id, state=state, operation=suspend)
        )

    fleet.answers |= {"WatchCommand": watch, "GetCommand": get}
    done = leasehold("suspend", "one", "two", "four", "five")
    ended = ["one", "four"] if is_answered else ["one"]
    told = [line for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert told == [f"{name}: suspend done" for name in ended]
    names = [f"c-{name}" for name in ("two", "four", "five") if name not in ended]
    assert done.code == 130
    assert done.stderr == (
        f"leasehold: interrupted; commands {', '.join(names)} continue: `leasehold get commands "
        f"{' '.join(names)}` shows their states\n"
    )
