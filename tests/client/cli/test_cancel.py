"""The verb cancel, and the options of stop."""

import json
from collections.abc import Iterator

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, errors_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import Command, CommandResult, MemberOutcome

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, refuse

PENDING, RUNNING, SUCCEEDED, FAILED, CANCELLED, EXPIRED = (
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_RUNNING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_CANCELLED,
    command_pb2.COMMAND_STATE_EXPIRED,
)


def plays(scripted: ScriptedCoordinator, *commands: Command) -> None:
    """The first of these is what a cancel finds, and a watch tells them all."""
    scripted.plays(*commands)
    scripted.answers["CancelCommand"] = lambda request, context: command_service_pb2.CancelCommandResponse(
        command=commands[0]
    )


def test_a_command_that_is_cancelled(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    member = MemberOutcome(
        pid=42,
        state_before=workload_pb2.MEMBER_STATE_RUNNING,
        state_after=workload_pb2.MEMBER_STATE_RUNNING,
        rolled_back=True,
    )
    result = CommandResult(members=[member], warnings=["hook back failed"])
    plays(scripted, command(RUNNING), command(CANCELLED, 2, result=result))
    done = leasehold("cancel", "c-1")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        "c-1: suspend is CANCELLED",
        "  pid 42: RUNNING -> RUNNING, rolled back",
        "  warning: hook back failed",
    ]
    [request] = scripted.asked(command_service_pb2.CancelCommandRequest)
    assert request.command_id == "c-1"


def test_one_that_was_never_sent_ends_at_once(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    plays(scripted, command(CANCELLED))
    done = leasehold("cancel", "c-1", "-o", "json")
    assert (done.code, json.loads(done.stdout)["state"]) == (0, "COMMAND_STATE_CANCELLED")
    assert not scripted.asked(command_service_pb2.WatchCommandRequest)


@pytest.mark.parametrize("before", [[], [command(RUNNING)]])
@pytest.mark.parametrize("output", ["table", "json"])
def test_one_that_had_succeeded_is_too_late(
    leasehold: CommandLine, scripted: ScriptedCoordinator, before: list[Command], output: str
) -> None:
    late = "the cancellation came after the point of no return"
    plays(scripted, *before, command(SUCCEEDED, 2, result=CommandResult(warnings=[late])))
    done = leasehold("cancel", "c-1", "-o", output)
    assert done.code == 1
    told = "was not cancelled" if before else "had ended already"
    assert done.stderr == f"leasehold: c-1 {told}: suspend SUCCEEDED\n  warning: {late}\n"
    assert bool(done.stdout) == (output == "json")


@pytest.mark.parametrize("before", [[], [command(RUNNING)]])
@pytest.mark.parametrize("state", [FAILED, EXPIRED])
def test_one_that_ended_otherwise_says_how(
    leasehold: CommandLine,
    scripted: ScriptedCoordinator,
    before: list[Command],
    state: command_pb2.CommandState.ValueType,
) -> None:
    error = errors_pb2.Error(reason=errors_pb2.ERROR_REASON_EXPIRED, message="out of time")
    members = CommandResult(members=[MemberOutcome(pid=7)])
    plays(scripted, *before, command(state, 2, error=error, result=members))
    done = leasehold("cancel", "c-1")
    name = command_pb2.CommandState.Name(state).removeprefix("COMMAND_STATE_")
    told = f"was not cancelled: suspend {name}: out of time (EXPIRED)"
    assert done.code == 1
    assert done.stderr.splitlines() == [
        f"leasehold: c-1 {told if before else f'had ended already: suspend {name}'}",
        "  pid 7: UNSPECIFIED -> UNSPECIFIED",
    ]


def test_nobody_need_wait_for_the_end(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    plays(scripted, command(RUNNING))
    done = leasehold("cancel", "c-1", "--no-wait")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "c-1: suspend is RUNNING, cancellation requested\n"
    assert json.loads(leasehold("cancel", "c-1", "--no-wait", "-o", "json").stdout)["command_id"] == "c-1"
    assert not scripted.asked(command_service_pb2.WatchCommandRequest)


def test_a_cancel_that_is_refused(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["CancelCommand"] = lambda request, context: refuse(
        context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_COMMAND", "no command has the id 'c-0'"
    )
    done = leasehold("cancel", "c-0")
    assert (done.code, done.stderr) == (1, "leasehold: no command has the id 'c-0' (UNKNOWN_COMMAND)\n")


@pytest.mark.parametrize("force", [False, True])
def test_stop_is_forced_only_where_it_is_asked_for(
    leasehold: CommandLine, scripted: ScriptedCoordinator, force: bool
) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["StopWorkload"] = lambda request, context: workload_service_pb2.StopWorkloadResponse(
        command=command(PENDING)
    )
    done = leasehold("stop", "one", "--grace", "0", *(["--force"] if force else []))
    assert done.code == 0
    [request] = scripted.asked(workload_service_pb2.StopWorkloadRequest)
    assert request.operation.force == force
    assert request.operation.HasField("grace")


@pytest.mark.parametrize(
    ("state", "options", "code", "told"),
    [
        (SUCCEEDED, [], 1, "c-1 had ended already"),
        (RUNNING, ["--wait-timeout", "0.3"], 4, "its cancellation is stored, and takes effect once"),
    ],
    ids=["too late", "not waited out"],
)
def test_an_unknown_command_is_named_beside_another(
    leasehold: CommandLine,
    scripted: ScriptedCoordinator,
    state: command_pb2.CommandState.ValueType,
    options: list[str],
    code: int,
    told: str,
) -> None:
    plays(scripted, command(state))
    known = scripted.answers["CancelCommand"]

    def cancel(request: command_service_pb2.CancelCommandRequest, context: grpc.ServicerContext) -> object:
        if request.command_id == "nope":
            refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_COMMAND", "no command has the id 'nope'")
        return known(request, context)

    scripted.answers["CancelCommand"] = cancel
    done = leasehold("cancel", "c-1", "nope", *options)
    assert done.code == code
    assert told in done.stderr
    assert "no command has the id 'nope'" in done.stderr


def test_several_have_one_deadline_and_each_has_its_outcome(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    def found(command_id: str, state: command_pb2.CommandState.ValueType, revision: int) -> Command:
        one = command(state, revision)
        one.command_id = command_id
        return one

    def cancel(
        request: command_service_pb2.CancelCommandRequest, context: grpc.ServicerContext
    ) -> command_service_pb2.CancelCommandResponse:
        if request.command_id == "nope":
            refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_COMMAND", "no command has the id 'nope'")
        return command_service_pb2.CancelCommandResponse(command=found(request.command_id, RUNNING, 1))

    def watch(
        request: command_service_pb2.WatchCommandRequest, context: object
    ) -> Iterator[command_service_pb2.WatchCommandResponse]:
        ends = request.command_id == "c-2"
        state, revision = (CANCELLED, 2) if ends else (RUNNING, 1)
        yield command_service_pb2.WatchCommandResponse(command=found(request.command_id, state, revision))

    scripted.answers |= {"CancelCommand": cancel, "WatchCommand": watch}
    done = leasehold("cancel", "c-1", "c-2", "c-3", "--wait-timeout", "0.3")
    assert (done.code, done.stdout) == (4, "c-2: suspend is CANCELLED\n")
    first, second = done.stderr.splitlines()
    for line, command_id in ((first, "c-1"), (second, "c-3")):
        assert command_id in line
        assert "; its cancellation is stored, and takes effect once its worker is in contact and" in line
    printed = leasehold("cancel", "c-1", "c-2", "--wait-timeout", "0.3", "-o", "json")
    states = {one["command_id"]: one["state"] for one in json.loads(printed.stdout)["commands"]}
    assert states == {"c-1": "COMMAND_STATE_RUNNING", "c-2": "COMMAND_STATE_CANCELLED"}
    one_of_two = leasehold("cancel", "c-2", "nope", "-o", "json")
    assert [one["command_id"] for one in json.loads(one_of_two.stdout)["commands"]] == ["c-2"]


@pytest.mark.usefixtures("short_outages")
def test_an_outage_tells_which_cancellations_are_stored(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    def cancel(
        request: command_service_pb2.CancelCommandRequest, context: grpc.ServicerContext
    ) -> command_service_pb2.CancelCommandResponse:
        if request.command_id == "c-2":
            context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return command_service_pb2.CancelCommandResponse(command=command(RUNNING))

    scripted.answers["CancelCommand"] = cancel
    done = leasehold("cancel", "c-1", "c-2")
    assert done.code == 3
    assert "; the cancellation of c-1 is stored" in done.stderr
