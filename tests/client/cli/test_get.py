"""Lists as tables and as JSON."""

import json

from leasehold.v1 import command_pb2, command_service_pb2, fleet_service_pb2, workload_service_pb2
from leasehold.v1.worker_pb2 import Worker

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import GPUS, B, C, ScriptedCoordinator, command, workload

PENDING, RUNNING = command_pb2.COMMAND_STATE_PENDING, command_pb2.COMMAND_STATE_RUNNING


def test_lists_as_tables_and_as_json(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[Worker(worker_id="w-1", name="alpha", gpu_count=2), Worker(worker_id="w-2", name="beta")]
    )
    scripted.answers["ListWorkloads"] = lambda request, context: workload_service_pb2.ListWorkloadsResponse(
        workloads=[workload()]
    )
    scripted.answers["ListCommands"] = lambda request, context: command_service_pb2.ListCommandsResponse(
        commands=[command(PENDING)]
    )
    for kind, match in {"workers": "beta", "gpus": B, "workloads": "alpha/0", "commands": "c-1"}.items():
        table = leasehold("get", kind)
        assert (table.code, table.stderr) == (0, "")
        assert match in table.stdout
        document = json.loads(leasehold("get", kind, "-o", "json").stdout)
        assert list(document) == [kind]
    assert json.loads(leasehold("get", "workloads", "one", "-o", "json").stdout)["name"] == "one"
    assert json.loads(leasehold("get", "gpus", "beta/0", "-o", "json").stdout)["gpu"]["uuid"] == C


def test_workers_that_have_not_reported_are_named(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    scripted.answers["ListGpus"] = lambda request, context: fleet_service_pb2.ListGpusResponse(
        gpus=GPUS, unreachable=["w-9"]
    )
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[Worker(worker_id="w-9", name="gamma")]
    )
    done = leasehold("get", "gpus", "-o", "json")
    assert len(json.loads(done.stdout)["gpus"]) == len(GPUS)
    assert "so their GPUs are unknown: gamma" in done.stderr
