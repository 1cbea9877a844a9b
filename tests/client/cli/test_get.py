"""Lists as tables and as JSON."""

import json
from typing import Any

from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    workload_service_pb2,
)
from leasehold.v1.worker_pb2 import Worker

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import GPUS, C, ScriptedCoordinator, command, workload

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
    for kind, match in {
        "workers": "beta",
        "gpus": "alpha/1",
        "workloads": "alpha/0",
        "commands": "c-1",
    }.items():
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


def test_filter_and_order_are_sent(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    asked: dict[str, tuple[str, str]] = {}

    def answer(kind: str, response: Any) -> Any:
        def answered(request: Any, context: object) -> Any:
            asked.setdefault(kind, (request.filter, getattr(request, "order_by", "")))
            return response

        return answered

    responses = {
        "Workers": fleet_service_pb2.ListWorkersResponse(),
        "Gpus": fleet_service_pb2.ListGpusResponse(),
        "Workloads": workload_service_pb2.ListWorkloadsResponse(),
        "Commands": command_service_pb2.ListCommandsResponse(),
        "Events": event_service_pb2.ListEventsResponse(),
        "Checkpoints": workload_service_pb2.ListCheckpointsResponse(),
    }
    for kind, response in responses.items():
        asked.clear()
        scripted.answers[f"List{kind}"] = answer(kind, response)
        order = [] if kind == "Checkpoints" else ["--sort-by", "name desc"]
        done = leasehold("get", kind.lower(), "--filter", "state = X", *order)
        assert (done.code, done.stderr) == (0, "")
        assert asked[kind] == ("state = X", "name desc" if order else "")


def test_options_of_lists_are_refused_where_they_mean_nothing(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    for options, match in (
        (["workers", "alpha", "--filter", "state = X"], "--filter and --sort-by are for lists"),
        (["gpus", "alpha/0", "--sort-by", "slot"], "--filter and --sort-by are for lists"),
        (["checkpoints", "--sort-by", "size_bytes"], "checkpoints are always listed newest first"),
    ):
        done = leasehold("get", *options)
        assert done.code == 2
        assert match in done.stderr


def test_commands_are_read_beyond_a_page_that_is_short(
    leasehold: CommandLine, scripted: ScriptedCoordinator
) -> None:
    """A page with a filter ends after so many entries that were looked through."""
    pages = {
        "": command_service_pb2.ListCommandsResponse(next_page_token="a"),
        "a": command_service_pb2.ListCommandsResponse(commands=[command(PENDING)], next_page_token="b"),
        "b": command_service_pb2.ListCommandsResponse(commands=[command(RUNNING)]),
    }
    scripted.answers["ListCommands"] = lambda request, context: pages[request.page_token]
    done = leasehold("get", "commands", "--filter", "worker = beta", "-o", "json")
    assert len(json.loads(done.stdout)["commands"]) == 2
