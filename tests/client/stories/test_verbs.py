"""The verbs against a scripted coordinator: what they send, print and exit with."""

import os
import time
from pathlib import Path

import grpc
import pytest
from leasehold.v1 import command_pb2, command_service_pb2, workload_pb2, workload_service_pb2
from leasehold.v1.command_pb2 import CommandResult
from leasehold.v1.fleet_service_pb2 import ListGpusResponse
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.lease_pb2 import GpuLease
from leasehold.v1.worker_pb2 import FleetGpu

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, B, ScriptedCoordinator, command, refuse, workload
from tests.ports import free_port
from tests.prefork import COMMAND_LINE, COORDINATOR, Forked

PENDING, RUNNING = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_RUNNING


SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED


def test_no_wait_returns_at_once(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(PENDING))
    done = leasehold("suspend", "one", "--no-wait")
    assert (done.code, done.stdout) == (0, "one: suspend stored as command c-1\n")
    assert not scripted.asked(command_service_pb2.WatchCommandRequest)


def test_a_command_that_is_done_is_done_without_a_list_of_gpus(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.plays(command(SUCCEEDED, result=CommandResult(released_gpu_uuids=[A])))
    del scripted.answers["ListGpus"]
    done = leasehold("suspend", "one")
    assert done.code == 0
    assert f"released {A}" in done.stdout


def test_a_refusal_is_one_line_with_its_reason(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.UNAVAILABLE, "WORKER_UNAVAILABLE", "worker alpha\nis LOST"
    )
    done = leasehold("suspend", "one", "-o", "json")
    assert (done.code, done.stdout) == (1, "")
    assert done.stderr == "leasehold: worker alpha is LOST (WORKER_UNAVAILABLE)\n"


@pytest.mark.usefixtures("short_outages")
def test_a_coordinator_that_stays_away_is_named_with_the_command(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.plays(command(RUNNING))
    scripted.answers["WatchCommand"] = lambda request, context: context.abort(
        grpc.StatusCode.UNAVAILABLE, "gone"
    )
    done = leasehold("suspend", "one")
    assert (done.code, done.stdout) == (3, "")
    [line] = done.stderr.splitlines()
    assert scripted.address in line
    assert "command c-1 continues: `leasehold get commands c-1` shows its state" in line


@pytest.mark.usefixtures("short_outages")
@pytest.mark.parametrize(
    "arguments",
    [
        "get workers",
        "suspend one",
        pytest.param("logs -f one", marks=pytest.mark.long),
        pytest.param("remap one --to alpha/0", marks=pytest.mark.long),
        pytest.param("run -- true", marks=pytest.mark.long),
    ],
)
def test_no_coordinator(bare_leasehold: CommandLine, arguments: str) -> None:
    verb, *others = arguments.split()
    done = bare_leasehold(verb, "--coordinator", "127.0.0.1:1", *others)
    assert (done.code, done.stdout) == (3, "")
    waiting, error = done.stderr.splitlines()
    assert waiting == "leasehold: waiting up to 0.8 s for a coordinator at 127.0.0.1:1"
    assert error.startswith("leasehold: no coordinator answers at 127.0.0.1:1")


@pytest.mark.long
def test_a_verb_waits_for_a_coordinator_that_is_just_starting(tmp_path: Path) -> None:
    port = free_port()
    listen = ["--listen", f"127.0.0.1:{port}", "--worker-listen", "127.0.0.1:0"]
    listen += ["--database", str(tmp_path / "store.sqlite3")]
    told = tmp_path / "stderr"
    with told.open("w") as stderr, (tmp_path / "coordinator.log").open("w") as log:
        arguments = ["get", "workers", "--coordinator", f"127.0.0.1:{port}"]
        verb = Forked(COMMAND_LINE, arguments, stdout=stderr, stderr=stderr, env=os.environ)
        while "waiting" not in told.read_text():
            assert verb.poll() is None, told.read_text()
            time.sleep(0.01)
        coordinator = Forked(COORDINATOR, listen, stdout=log, stderr=log, env=os.environ)
        try:
            assert verb.wait(20) == 0, told.read_text()
        finally:
            coordinator.terminate()
            assert coordinator.wait(20) == 0, (tmp_path / "coordinator.log").read_text()
    first, *others = told.read_text().splitlines()
    assert first == f"leasehold: waiting up to 5 s for a coordinator at 127.0.0.1:{port}"
    assert not [line for line in others if line.startswith("leasehold:")]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("", "Usage: leasehold"),
        ("nothing", "No such command 'nothing': see `leasehold --help`"),
        ("get", "Missing argument"),
        ("get things", "'things' is not a kind: choose workers, gpus, workloads,"),
        ("run", "Missing argument"),
        ("run --gpsu 1 -- true", "No such option '--gpsu'"),
        ("run --gpus -1 -- true", "-1 is not in the range"),
        ("run --env WORD -- true", "invalid variable 'WORD': write NAME=VALUE"),
        ("suspend one --timeout 0", "0 is not in the range from 0.001s to 7d"),
        ("suspend one --timeout nan", "'nan' is not a time"),
        ("suspend one --timeout 1e300", "is not in the range"),
        ("suspend one --coordinator here", "invalid coordinator address 'here': write HOST:PORT"),
        ("remap one", "either --pair OLD=NEW or --to"),
        ("remap one --pair alpha/0=alpha/1 --to alpha/1", "either --pair OLD=NEW or --to"),
        ("remap one two --pair alpha/0=alpha/1 --swap", "either --pair OLD=NEW or --to GPU,... or --swap"),
        ("remap one two --to alpha/1", "--to moves one workload, and 2 are named"),
        ("remap one --swap", "--swap takes two workloads, not 1: name two"),
        ("remap one two three --swap", "--swap takes two workloads, not 3: name two"),
        ("remap --swap", "Missing argument 'WORKLOAD...'"),
        ("suspend one --lock-timeout 0", "0 is not in the range from 0.001s to 7d"),
        ("suspend one --lock-timeout inf", "is not in the range"),
        ("remap one --to alpha/1 --lock-timeout -1", "-1 is not in the range"),
        ("restore one --lock-timeout 1", "No such option '--lock-timeout'"),
        ("cancel", "Missing argument 'COMMAND...'"),
        ("remap one --pair alpha/0", "'alpha/0' is not a pair"),
        ("remap one --pair alpha/0=GPU-", "is a prefix of 3 UUIDs"),
        ("remap one --to alpha/0,alpha/1", "the list has 2 GPUs, and the workload holds 1"),
        ("restore one --to gamma/0", "no GPU is at 'gamma/0'"),
        ("restore one --to alpha/0,aaaa", "names a GPU twice"),
    ],
)
def test_bad_usage(leasehold: CommandLine, scripted: ScriptedCoordinator, arguments: str, match: str) -> None:
    done = leasehold(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr
    assert not arguments or (done.stderr.startswith("leasehold: ") and done.stderr.count("\n") == 1)
    changing = [request for request in scripted.requests if hasattr(request, "request_id")]
    assert not changing


def test_a_bad_configuration(bare_leasehold: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "leasehold").mkdir()
    (tmp_path / "leasehold/cli.toml").write_text("coordinater = 'x'\n")
    done = bare_leasehold("get", "workers")
    assert done.code == 2
    assert "coordinater" in done.stderr


def test_gpus_are_sent_by_uuid_in_their_order(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["GetWorkload"] = lambda request, context: workload_service_pb2.GetWorkloadResponse(
        workload=workload("one", B, A)
    )
    scripted.answers["RemapWorkloads"] = lambda request, context: workload_service_pb2.RemapWorkloadsResponse(
        command=command(PENDING)
    )
    scripted.answers["RestoreWorkload"] = lambda request, context: (
        workload_service_pb2.RestoreWorkloadResponse(command=command(PENDING))
    )
    assert leasehold("remap", "one", "--to", "alpha/0,bbbb").code == 0
    assert leasehold("remap", "one", "--pair", f"{A}=alpha/1").code == 0
    assert leasehold("restore", "one", "--to", "alpha/1,GPU-a").code == 0
    pairs = [
        [(pair.old_uuid, pair.new_uuid) for pair in request.operation.moves[0].pairs]
        for request in scripted.asked(workload_service_pb2.RemapWorkloadsRequest)
    ]
    assert pairs == [[(B, A), (A, B)], [(A, B)]]
    [request] = scripted.asked(workload_service_pb2.RestoreWorkloadRequest)
    assert list(request.operation.gpu_uuids) == [B, A]


@pytest.mark.parametrize("verb", ["wake", "restore"])
@pytest.mark.parametrize("planned", [[], ["--dry-run"]])
def test_a_parked_workload_cannot_leave_its_host(
    leasehold: CommandLine, scripted: ScriptedCoordinator, verb: str, planned: list[str]
) -> None:
    done = leasehold(verb, "one", "--to", "beta/0", *planned)
    assert (done.code, done.stdout) == (2, "")
    assert done.stderr == (
        "leasehold: one can't be restored on beta/0: a suspended workload can't leave its worker, and "
        "beta is another worker; "
        "name a GPU of alpha\n"
    )
    assert not scripted.asked(workload_service_pb2.RestoreWorkloadRequest)


def test_refusals_and_warnings_name_gpus_as_people_do(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context,
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_FREE_GPU",
        f"{A} is leased, and {'GPU-9' + A[5:]} too",
    )
    done = leasehold("suspend", "one")
    assert "alpha/0 is leased, and GPU-9" in done.stderr
    scripted.plays(command(SUCCEEDED, result=CommandResult(warnings=[f"a process is on {B}"])))
    assert "  warning: a process is on alpha/1\n" in leasehold("suspend", "one").stdout


def test_refusals_name_the_holder_of_a_gpu_as_people_do(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    holder = FleetGpu(gpu=Gpu(uuid=A), worker_name="alpha", lease=GpuLease(workload_id="w-0123456789ab"))
    holder.workload_name = "two"
    scripted.answers["ListGpus"] = lambda request, context: ListGpusResponse(gpus=[holder])
    scripted.answers["SuspendWorkload"] = lambda request, context: refuse(
        context,
        grpc.StatusCode.FAILED_PRECONDITION,
        "NO_FREE_GPU",
        f"{A} is leased for workload w-0123456789ab: choose another, or suspend its holder",
    )
    assert "alpha/0 is leased for workload two: choose" in leasehold("suspend", "one").stderr


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("SUSPENDED", "restore it on other GPUs with `leasehold restore one --to GPU`"),
        ("WEDGED", "stop it, nothing else helps"),
        ("PENDING", "move workloads that run on GPUs"),
    ],
)
def test_a_workload_that_holds_no_gpu_is_not_moved(
    leasehold: CommandLine, scripted: ScriptedCoordinator, state: str, remedy: str
) -> None:
    status = workload_pb2.WorkloadStatus(state=workload_pb2.WorkloadState.Value(f"WORKLOAD_STATE_{state}"))
    scripted.answers["GetWorkload"] = lambda request, context: workload_service_pb2.GetWorkloadResponse(
        workload=workload_pb2.Workload(status=status)
    )
    done = leasehold("remap", "one", "--to", "alpha/1")
    assert done.code == 1
    assert f"one is {state} and holds no GPU, so it can't be moved: {remedy} (WRONG_STATE)" in done.stderr
