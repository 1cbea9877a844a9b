"""The verbs that take GPUs and workers out of service, one command for each worker."""

import getpass
import json
import socket
from collections.abc import Iterator

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, errors_pb2, fleet_service_pb2, operation_pb2
from leasehold.v1.command_pb2 import Command, CommandResult, CommandState
from leasehold.v1.command_service_pb2 import WatchCommandRequest
from leasehold.v1.enrolment_service_pb2 import UnbindGpuRequest, UnbindGpuResponse
from leasehold.v1.fleet_service_pb2 import CordonRequest, ResetGpuHealthRequest, UncordonRequest
from leasehold.v1.lease_pb2 import Cordon
from leasehold.v1.operation_pb2 import Operation
from leasehold.v1.worker_pb2 import Worker

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, B, C, ScriptedCoordinator, refuse

PENDING, SUCCEEDED, FAILED, RUNNING = (
    command_pb2.COMMAND_STATE_PENDING,
    command_pb2.COMMAND_STATE_SUCCEEDED,
    command_pb2.COMMAND_STATE_FAILED,
    command_pb2.COMMAND_STATE_RUNNING,
)


@pytest.fixture
def fleet(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A coordinator whose workers do what they are told."""
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[Worker(worker_id="w-1", name="alpha"), Worker(worker_id="w-2", name="beta")]
    )

    def cordon(request: CordonRequest, context: grpc.ServicerContext) -> fleet_service_pb2.CordonResponse:
        return fleet_service_pb2.CordonResponse(
            command=created(request.worker, Operation(cordon=request.operation))
        )

    def uncordon(
        request: UncordonRequest, context: grpc.ServicerContext
    ) -> fleet_service_pb2.UncordonResponse:
        operation = Operation(uncordon=request.operation)
        return fleet_service_pb2.UncordonResponse(command=created(request.worker, operation))

    def reset(
        request: ResetGpuHealthRequest, context: grpc.ServicerContext
    ) -> fleet_service_pb2.ResetGpuHealthResponse:
        operation = Operation(reset_gpu_health=request.operation)
        return fleet_service_pb2.ResetGpuHealthResponse(command=created(request.worker, operation))

    scripted.answers |= {"Cordon": cordon, "Uncordon": uncordon, "ResetGpuHealth": reset}
    ends(scripted)
    return scripted


def created(worker_id: str, operation: Operation) -> Command:
    return Command(
        command_id=f"c-{worker_id}", worker_id=worker_id, state=PENDING, revision=1, operation=operation
    )


def ends(scripted: ScriptedCoordinator, **states: CommandState.ValueType) -> None:
    """Commands end so, by the worker's number; the others succeed."""

    def watch(
        request: WatchCommandRequest, context: grpc.ServicerContext
    ) -> Iterator[command_service_pb2.WatchCommandResponse]:
        state = states.get(request.command_id.removeprefix("c-").replace("-", ""), SUCCEEDED)
        command = created(request.command_id[2:], Operation(cordon=operation_pb2.CordonOperation()))
        command.state, command.revision = state, 2
        if state == FAILED:
            command.error.CopyFrom(
                errors_pb2.Error(
                    reason=errors_pb2.ERROR_REASON_STORAGE_UNAVAILABLE, message="the disk is full"
                )
            )
        yield command_service_pb2.WatchCommandResponse(command=command)

    scripted.answers["WatchCommand"] = watch


def test_a_cordon_says_why_and_who(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    done = leasehold("cordon", "alpha/1", "beta", A, "--reason", "fan is loud", "--timeout", "5")
    assert (done.code, done.stderr) == (0, "")
    assert done.stdout == "alpha/1, alpha/0: cordon done\nbeta: cordon done\n"
    gpus, whole = fleet.asked(CordonRequest)
    assert (gpus.worker, list(gpus.operation.gpu_uuids)) == ("w-1", [B, A])
    assert (whole.worker, list(whole.operation.gpu_uuids)) == ("w-2", [])
    assert {request.operation.reason for request in (gpus, whole)} == {"fan is loud"}
    assert gpus.operation.cordoned_by == f"{getpass.getuser()}@{socket.gethostname()}"
    assert gpus.timeout.seconds == 5
    assert gpus.request_id != whole.request_id


def test_an_uncordon_and_a_reset(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    assert leasehold("uncordon", "alpha").code == 0
    assert leasehold("gpu", "reset-health", "beta/0", "alpha/0").code == 0
    [uncordoned] = fleet.asked(UncordonRequest)
    assert (uncordoned.worker, list(uncordoned.operation.gpu_uuids)) == ("w-1", [])
    resets = {
        request.worker: list(request.operation.gpu_uuids) for request in fleet.asked(ResetGpuHealthRequest)
    }
    assert resets == {"w-1": [A], "w-2": [C]}


def test_a_gpu_is_unbound_by_its_uuid_or_its_place(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    fleet.answers["UnbindGpu"] = lambda request, context: UnbindGpuResponse(identity="worker/gone")
    assert leasehold("gpu", "unbind", A).stdout == f"{A}: unbound from worker/gone\n"
    assert leasehold("gpu", "unbind", "alpha/0").stdout == f"alpha/0 ({A}): unbound from worker/gone\n"
    assert [request.gpu_uuid for request in fleet.asked(UnbindGpuRequest)] == [A, A]
    done = leasehold("gpu", "unbind", "alpha/9")
    assert (done.code, done.stdout) == (2, "")
    assert "no GPU is at 'alpha/9'" in done.stderr
    assert len(fleet.asked(UnbindGpuRequest)) == 2


def test_a_gpu_that_is_not_unbound_is_quoted_as_given(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    fleet.answers["UnbindGpu"] = lambda request, context: refuse(
        context,
        grpc.StatusCode.NOT_FOUND,
        "UNKNOWN_GPU",
        f"the GPU {request.gpu_uuid!r} belongs to no enrolled worker",
    )
    told = f"leasehold: the GPU '{A}' belongs to no enrolled worker (UNKNOWN_GPU)\n"
    assert leasehold("gpu", "unbind", A).stderr == told


def test_a_cordon_that_stays_is_told(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    cordoned = Worker(worker_id="w-1", name="alpha", cordon=Cordon(reason="repair"))
    fleet.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[cordoned, Worker(worker_id="w-2", name="beta")]
    )
    fleet.answers["GetWorker"] = lambda request, context: fleet_service_pb2.GetWorkerResponse(worker=cordoned)
    told = leasehold("uncordon", "alpha/0").stderr
    assert told.startswith(
        "leasehold: worker alpha has a cordon of its own, which keeps its GPUs out of service: "
    )
    assert leasehold("uncordon", "alpha/0", "-q").stderr == ""
    assert leasehold("uncordon", "alpha").stderr == ""


def test_all_are_waited_for_and_one_that_fails_is_named(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    ends(fleet, w1=FAILED)
    done = leasehold("cordon", "alpha", "beta", "--reason", "x")
    assert (done.code, done.stdout) == (1, "beta: cordon done\n")
    assert done.stderr == "leasehold: alpha: cordon FAILED: the disk is full (STORAGE_UNAVAILABLE)\n"


def test_one_that_is_refused_holds_up_no_other(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    cordon = fleet.answers["Cordon"]
    fleet.answers["Cordon"] = lambda request, context: (
        refuse(context, grpc.StatusCode.FAILED_PRECONDITION, "WORKER_UNAVAILABLE", "worker alpha is LOST")
        if request.worker == "w-1"
        else cordon(request, context)
    )
    done = leasehold("cordon", "alpha", "beta", "--reason", "x", "-o", "json")
    assert done.code == 1
    assert done.stderr == "leasehold: worker alpha is LOST (WORKER_UNAVAILABLE)\n"
    assert [command["worker_id"] for command in json.loads(done.stdout)["commands"]] == ["w-2"]
    alone = leasehold("cordon", "alpha", "--reason", "x", "-o", "json")
    assert (alone.code, alone.stdout) == (1, "")


@pytest.mark.parametrize(("reason", "code"), [("INVALID_ARGUMENT", 2), ("WORKER_UNAVAILABLE", 1)])
def test_the_code_is_2_if_each_refusal_is_a_usage_error(
    leasehold: CommandLine, fleet: ScriptedCoordinator, reason: str, code: int
) -> None:
    usage = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "reason has 300 bytes: give at most 256")
    other = (grpc.StatusCode.UNAVAILABLE, reason, "worker alpha is LOST")
    fleet.answers["Cordon"] = lambda request, context: refuse(
        context, *(other if request.worker == "w-1" and reason != "INVALID_ARGUMENT" else usage)
    )
    assert leasehold("cordon", "alpha", "beta", "--reason", "x").code == code
    assert leasehold("cordon", "--all", "--reason", "x").code == code
    assert leasehold("cordon", "beta", "--reason", "x").code == 2


def test_one_command_is_one_document(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    done = leasehold("cordon", "alpha", "--reason", "x", "-o", "json")
    assert json.loads(done.stdout)["command_id"] == "c-w-1"


def test_no_wait_names_each_command(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    done = leasehold("uncordon", "alpha/0", "beta", "--no-wait")
    assert done.code == 0
    assert done.stdout.splitlines() == [
        "alpha/0: uncordon stored as command c-w-1",
        "beta: uncordon stored as command c-w-2",
    ]
    assert not fleet.asked(WatchCommandRequest)


def test_the_wait_timeout_is_for_all_of_them(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    ends(fleet, w1=RUNNING)
    done = leasehold("cordon", "alpha", "beta", "--reason", "x", "--wait-timeout", "2")
    assert (done.code, done.stdout) == (4, "beta: cordon done\n")
    assert "command c-w-1 has not ended" in done.stderr


def test_what_is_so_already_is_said(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    command = created("w-1", Operation(cordon=operation_pb2.CordonOperation()))
    command.state, command.result.already_there = SUCCEEDED, True
    fleet.answers["Cordon"] = lambda request, context: fleet_service_pb2.CordonResponse(command=command)
    fleet.answers["WatchCommand"] = lambda request, context: (
        command_service_pb2.WatchCommandResponse(command=one) for one in [command]
    )
    assert leasehold("cordon", "alpha", "--reason", "x").stdout == "alpha: cordon nothing to do\n"
    assert command.result == CommandResult(already_there=True)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("cordon --reason x", "name either a GPU or a worker, or choose workers by -l or --all"),
        ("cordon alpha", "Missing option '--reason'"),
        ("cordon gamma --reason x", "no worker is named 'gamma'"),
        ("uncordon alpha alpha", "a second time"),
        ("gpu reset-health", "Missing argument 'GPU...'"),
        ("gpu reset-health alpha", "no GPU has a UUID that begins with 'alpha'"),
        ("gpu mend", "No such command 'mend': write one of unbind, reset-health"),
    ],
)
def test_bad_usage(leasehold: CommandLine, fleet: ScriptedCoordinator, arguments: str, match: str) -> None:
    done = leasehold(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr


def test_a_user_without_a_name_is_unknown(
    leasehold: CommandLine, fleet: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert leasehold("cordon", "alpha", "--reason", "x").code == 0
    [request] = fleet.asked(CordonRequest)
    assert request.operation.cordoned_by.startswith("unknown@")


def test_a_worker_is_deleted(leasehold: CommandLine, fleet: ScriptedCoordinator) -> None:
    fleet.answers["DeleteWorker"] = lambda request, context: fleet_service_pb2.DeleteWorkerResponse(
        worker=Worker(worker_id="w-9", name=request.worker), failed_workload_ids=["w-1", "w-2"]
    )
    done = leasehold("rm", "worker", "gone")
    assert (done.code, done.stdout) == (0, "gone (w-9): deleted; 2 workloads of it FAILED\n")
    assert json.loads(leasehold("rm", "worker", "gone", "-o", "json").stdout)["worker"]["name"] == "gone"


def test_a_worker_that_is_connected_is_not_deleted(
    leasehold: CommandLine, fleet: ScriptedCoordinator
) -> None:
    fleet.answers["DeleteWorker"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WORKER_CONNECTED", "worker alpha is connected"
    )
    done = leasehold("rm", "worker", "alpha")
    assert (done.code, done.stderr) == (1, "leasehold: worker alpha is connected (WORKER_CONNECTED)\n")
