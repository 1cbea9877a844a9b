"""The verbs that take in processes and let them go, and what a new workload may ask for."""

import grpc
import pytest
from leasehold.v1 import command_pb2, eviction_pb2, workload_service_pb2
from leasehold.v1.workload_pb2 import HelperTerms
from leasehold.v1.workload_service_pb2 import (
    AdoptProcessRequest,
    CreateWorkloadRequest,
    ReleaseWorkloadRequest,
)

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import A, C, ScriptedCoordinator, command, refuse, workload

SUCCEEDED, PENDING = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_PENDING


def test_a_process_is_adopted(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["AdoptProcess"] = lambda request, context: workload_service_pb2.AdoptProcessResponse(
        workload=workload("made-up"), command=command(PENDING)
    )
    done = leasehold("adopt", "--worker", "alpha", "--pid", "4711", "--timeout", "3")
    assert done.code == 0
    assert done.stdout.startswith("made-up: ")
    leasehold("adopt", "--worker", "alpha", "--pid", "1", "--name", "mine", "--no-wait")
    unnamed, named = scripted.asked(AdoptProcessRequest)
    assert (unnamed.worker, unnamed.operation.pid, unnamed.operation.name) == ("alpha", 4711, "")
    assert unnamed.timeout.seconds == 3
    assert named.operation.name == "mine"
    assert unnamed.request_id


def test_a_workload_is_released(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["ReleaseWorkload"] = lambda request, context: (
        workload_service_pb2.ReleaseWorkloadResponse(command=command(PENDING))
    )
    assert leasehold("release", "one").code == 0
    [request] = scripted.asked(ReleaseWorkloadRequest)
    assert request.workload == "one"
    assert not request.HasField("expected_generation")


def test_what_leasehold_started_is_not_released(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["ReleaseWorkload"] = lambda request, context: refuse(
        context, grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE", "stop it instead"
    )
    done = leasehold("release", "one")
    assert (done.code, done.stderr) == (1, "leasehold: stop it instead (WRONG_STATE)\n")


def test_run_says_what_it_needs(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, context: workload_service_pb2.CreateWorkloadResponse(
        workload=workload("made-up"), command=command(PENDING)
    )
    options = ["--cpu", "0.5", "--memory", "1GiB", "--helper", "suspend", "--yield-grace", "5"]
    done = leasehold("run", "--gpu", "beta/0", "--gpu", "aaaa", *options, "--", "train", "--cpu", "9")
    assert done.code == 0, done.stderr
    [request] = scripted.asked(CreateWorkloadRequest)
    assert list(request.gpu_uuids) == [C, A]
    assert list(request.spec.arguments) == ["train", "--cpu", "9"]
    assert request.spec.resources.cpu_millicores == 500
    assert request.spec.resources.memory_bytes == 2**30
    assert request.spec.helper.process_strategy == eviction_pb2.PROCESS_STRATEGY_CUDA_SUSPEND
    assert request.spec.helper.grace.seconds == 5
    leasehold("run", "--", "train")
    plain = scripted.asked(CreateWorkloadRequest)[-1]
    assert not plain.spec.HasField("helper")
    assert plain.spec.helper == HelperTerms()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("adopt --pid 1", "Missing option '--worker'"),
        ("adopt --worker alpha", "Missing option '--pid'"),
        ("adopt --worker alpha --pid 0", "0 is not in the range"),
        ("adopt --worker alpha --pid 5000000", "is not in the range"),
        ("release", "give either a workload or --hold"),
        ("run --memory much -- true", "'much' is not a size: write a number and a unit"),
        ("run --gpu alpha/0 --gpu aaaa -- true", "names a GPU twice"),
        ("run --gpu alpha/9 -- true", "no GPU is at 'alpha/9'"),
        (
            "run --yield-grace 5 -- true",
            "--yield-grace and --yield-signal need --helper suspend or --helper stop: see `",
        ),
    ],
)
def test_bad_usage(leasehold: CommandLine, scripted: ScriptedCoordinator, arguments: str, match: str) -> None:
    done = leasehold(*arguments.split())
    assert (done.code, done.stdout) == (2, "")
    assert match in done.stderr
    assert done.stderr.count("\n") == 1
