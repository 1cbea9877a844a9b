"""Lists as tables and as JSON."""

import json
from typing import Any

import grpc
import pytest
import yaml
from leasehold.v1 import (
    command_pb2,
    command_service_pb2,
    event_service_pb2,
    fleet_service_pb2,
    workload_service_pb2,
)
from leasehold.v1.worker_pb2 import Worker

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import GPUS, C, ScriptedCoordinator, command, refuse, workload

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


@pytest.fixture
def listed(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """A fleet with a worker and two workloads."""
    scripted.answers |= {
        "ListWorkers": lambda request, context: fleet_service_pb2.ListWorkersResponse(
            workers=[Worker(worker_id="w-1", name="alpha", gpu_count=2)]
        ),
        "ListWorkloads": lambda request, context: workload_service_pb2.ListWorkloadsResponse(
            workloads=[workload("one"), workload("two")]
        ),
        "ListCommands": lambda request, context: command_service_pb2.ListCommandsResponse(
            commands=[command(PENDING, workload_id="id-of-two")]
        ),
    }
    return scripted


@pytest.mark.parametrize("word", ["workloads", "workload", "wl", "WORKLOADS"])
def test_a_kind_has_several_words(leasehold: CommandLine, listed: ScriptedCoordinator, word: str) -> None:
    assert leasehold("get", word, "-o", "name").stdout == "one\ntwo\n"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ("workloads -q", "id-of-one\nid-of-two\n"),
        ("gpus -o name", "alpha/0\nalpha/1\nbeta/0\n"),
        ("commands -o name", "c-1\n"),
        ("workloads --columns NAME,id", "NAME  ID\none   id-of-one\ntwo   id-of-two\n"),
        ("commands --columns about", "ABOUT\ntwo\n"),
        ("workload one two --columns name", "NAME\none\ntwo\n"),
        ("gpu alpha/1 beta/0 -o name", "alpha/1\nbeta/0\n"),
        ("gpus alpha/0,alpha/1 -o name", "alpha/0\nalpha/1\n"),
    ],
)
def test_a_list_is_printed_as_asked(
    leasehold: CommandLine, listed: ScriptedCoordinator, arguments: str, printed: str
) -> None:
    done = leasehold("get", *arguments.split())
    assert (done.code, done.stdout, done.stderr) == (0, printed, "")


def test_yaml_has_the_content_of_json(leasehold: CommandLine, listed: ScriptedCoordinator) -> None:
    for words in (["workloads"], ["workload", "one"], ["workload", "one", "two"]):
        text = leasehold("get", *words, "-o", "yaml").stdout
        assert yaml.safe_load(text) == json.loads(leasehold("get", *words, "-o", "json").stdout)


def test_wide_tables_have_more_columns(leasehold: CommandLine, listed: ScriptedCoordinator) -> None:
    assert "id-of-one" not in leasehold("get", "workloads").stdout
    assert "id-of-one" in leasehold("get", "workloads", "-o", "wide").stdout


def test_what_is_found_is_printed_before_what_is_not(
    leasehold: CommandLine, listed: ScriptedCoordinator
) -> None:
    def get(request: Any, context: grpc.ServicerContext) -> object:
        if request.workload == "nobody":
            refuse(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKLOAD", "no workload is named nobody")
        return workload_service_pb2.GetWorkloadResponse(workload=workload(request.workload))

    listed.answers["GetWorkload"] = get
    done = leasehold("get", "workloads", "nobody", "two", "-o", "name")
    assert (done.code, done.stdout) == (1, "two\n")
    assert done.stderr == "leasehold: no workload is named nobody (UNKNOWN_WORKLOAD)\n"


def test_a_label_selector_is_a_filter(leasehold: CommandLine, listed: ScriptedCoordinator) -> None:
    assert leasehold("get", "workers", "-l", "rack=r1", "--filter", "state = LOST").code == 0
    (request,) = listed.asked(fleet_service_pb2.ListWorkersRequest)
    assert request.filter == 'state = LOST AND labels."rack" = "r1"'


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


@pytest.mark.parametrize(("name", "is_told"), [("alpha/0", False), ("nowhere/0", True)])
def test_workers_that_have_not_reported_matter_to_a_name_that_is_not_found(
    leasehold: CommandLine, scripted: ScriptedCoordinator, name: str, is_told: bool
) -> None:
    scripted.answers["ListGpus"] = lambda request, context: fleet_service_pb2.ListGpusResponse(
        gpus=GPUS, unreachable=["w-9"]
    )
    scripted.answers["ListWorkers"] = lambda request, context: fleet_service_pb2.ListWorkersResponse(
        workers=[Worker(worker_id="w-9", name="gamma")]
    )
    done = leasehold("describe", "gpu", name)
    assert done.code == (2 if is_told else 0)
    assert ("so their GPUs are unknown: gamma" in done.stderr) is is_told


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
    leasehold: CommandLine, listed: ScriptedCoordinator
) -> None:
    for options, match in (
        (["workers", "alpha", "--filter", "state = X"], "--filter and --sort-by are for lists"),
        (["gpus", "alpha/0", "--sort-by", "slot"], "--filter and --sort-by are for lists"),
        (["gpus", "-l", "a=b"], "gpus have no labels"),
        (["audit", "-l", "a=b"], "audit entries have no labels"),
        (["workloads", "--columns", "name", "-o", "json"], "--columns is for tables"),
        (["workloads", "--columns", "name", "-q"], "--columns is for tables"),
        (["workloads", "-q", "-o", "yaml"], "-q prints ids only"),
        (["workloads", "--columns", ""], "the value is empty: give one, or leave it out"),
        (["workloads", "-l", ""], "the value is empty"),
        (["workloads", "--filter", ""], "the value is empty"),
        (["workloads", "--columns", "nmae"], "no column is named 'nmae' (did you mean 'name'?)"),
        (["workloads", "--watch", "-o", "wide"], "--watch prints a line per change"),
        (["workloads", "one", "two", "--watch"], "--watch shows all or one"),
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
