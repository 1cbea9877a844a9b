"""The request that ``leasehold run`` makes."""

from leasehold.v1 import command_pb2, workload_service_pb2

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, command, workload

PENDING, RUNNING = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_RUNNING


SUCCEEDED, FAILED = command_pb2.COMMAND_STATE_SUCCEEDED, command_pb2.COMMAND_STATE_FAILED


def test_run_sends_what_was_asked_for(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.plays(command(SUCCEEDED))
    scripted.answers["CreateWorkload"] = lambda request, context: workload_service_pb2.CreateWorkloadResponse(
        workload=workload("made-up"), command=command(PENDING)
    )
    options = ["--gpus", "2", "--worker", "alpha", "--env", "WORD=a=b", "--env", "EMPTY="]
    done = leasehold("run", *options, "--", "train", "--gpus", "9", "-o")
    assert done.code == 0
    assert done.stdout.startswith("made-up: ")
    [request] = scripted.asked(workload_service_pb2.CreateWorkloadRequest)
    assert list(request.spec.arguments) == ["train", "--gpus", "9", "-o"]
    assert dict(request.spec.environment) == {"WORD": "a=b", "EMPTY": ""}
    assert request.spec.resources.gpu_count == 2
    assert (request.worker, request.name) == ("alpha", "")
    assert not request.HasField("timeout")
