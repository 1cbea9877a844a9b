"""``leasehold get --watch``: one line per entry, change and deletion."""

import json
from collections.abc import Iterator

import grpc
import pytest
from leasehold.v1.command_pb2 import COMMAND_STATE_RUNNING
from leasehold.v1.command_service_pb2 import WatchCommandsRequest, WatchCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import WatchEventsRequest, WatchEventsResponse
from leasehold.v1.fleet_service_pb2 import WatchFleetRequest, WatchFleetResponse
from leasehold.v1.lease_pb2 import Cordon
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.worker_pb2 import WORKER_STATE_CONNECTED, WORKER_STATE_LOST, Worker, WorkerState
from leasehold.v1.workload_service_pb2 import WatchWorkloadsRequest, WatchWorkloadsResponse
from leasehold_client.cli import get_watch

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import GPUS, ScriptedCoordinator, command, refuse, workload

BOOKMARK = Bookmark(snapshot_end=True)


@pytest.fixture
def watched(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """Watches of a few changes, which then end."""

    def fleet(request: WatchFleetRequest, _: object) -> Iterator[WatchFleetResponse]:
        yield WatchFleetResponse(worker=Worker(name="alpha", state=WORKER_STATE_CONNECTED))
        yield WatchFleetResponse(gpu=GPUS[0])
        yield WatchFleetResponse(bookmark=BOOKMARK)
        yield WatchFleetResponse(deleted_gpu_uuid="GPU-1")
        yield WatchFleetResponse(deleted_worker_id="w-1")

    def workloads(request: WatchWorkloadsRequest, _: object) -> Iterator[WatchWorkloadsResponse]:
        yield WatchWorkloadsResponse(workload=workload())
        yield WatchWorkloadsResponse(bookmark=BOOKMARK)
        yield WatchWorkloadsResponse(deleted_workload_id="id-of-one")

    def commands(request: WatchCommandsRequest, _: object) -> Iterator[WatchCommandsResponse]:
        yield WatchCommandsResponse(command=command(COMMAND_STATE_RUNNING))

    def events(request: WatchEventsRequest, _: object) -> Iterator[WatchEventsResponse]:
        yield WatchEventsResponse(event=Event(message="worker\nalpha is in contact"))

    scripted.answers |= {
        "WatchFleet": fleet,
        "WatchWorkloads": workloads,
        "WatchCommands": commands,
        "WatchEvents": events,
    }
    return scripted


def test_each_change_is_a_line(leasehold: CommandLine, watched: ScriptedCoordinator) -> None:
    assert leasehold("get", "workers", "--watch").stdout == "alpha CONNECTED\nw-1 deleted\n"
    gpu, deleted = leasehold("get", "gpus", "-w").stdout.splitlines()
    assert gpu.startswith("alpha/0 ")
    assert deleted == "GPU-1 deleted"
    assert leasehold("get", "workloads", "-w").stdout == "one RUNNING\none deleted\n"
    assert leasehold("get", "commands", "-w").stdout.startswith("c-1 suspend RUNNING")
    [event] = leasehold("get", "events", "-w").stdout.splitlines()
    assert event.endswith("alpha is in contact")
    lines = leasehold("get", "workloads", "-w", "-o", "json").stdout.splitlines()
    assert json.loads(lines[0])["workload"]["name"] == "one"
    assert json.loads(lines[1]) == {"deleted_workload_id": "id-of-one"}


def test_a_filtered_watch_tells_no_deletion_of_an_entry_that_was_not_printed(
    leasehold: CommandLine, watched: ScriptedCoordinator
) -> None:
    def workloads(request: WatchWorkloadsRequest, _: object) -> Iterator[WatchWorkloadsResponse]:
        yield WatchWorkloadsResponse(workload=workload("one"))
        yield WatchWorkloadsResponse(bookmark=BOOKMARK)
        for workload_id in ("id-of-two", "id-of-one", "id-of-one", "id-of-two"):
            yield WatchWorkloadsResponse(deleted_workload_id=workload_id)
        yield WatchWorkloadsResponse(workload=workload("two"))
        yield WatchWorkloadsResponse(deleted_workload_id="id-of-two")

    watched.answers["WatchWorkloads"] = workloads
    assert leasehold("get", "workloads", "-w", "--filter", "state = RUNNING").stdout.splitlines() == [
        "one RUNNING",
        "one no longer matches, or was deleted",
        "two RUNNING",
        "two no longer matches, or was deleted",
    ]
    lines = leasehold("get", "workloads", "-w", "-l", "team=a", "-o", "json").stdout.splitlines()
    assert [line for line in lines if "deleted" in line] == [
        '{"deleted_workload_id": "id-of-one"}',
        '{"deleted_workload_id": "id-of-two"}',
    ]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("workers", ["alpha CONNECTED"]),
        ("gpus", ["alpha/0 unspecified one"]),
        ("commands", ["c-1 suspend RUNNING"]),
    ],
)
def test_entries_of_each_kind_that_no_longer_match(
    leasehold: CommandLine, watched: ScriptedCoordinator, kind: str, told: list[str]
) -> None:
    def fleet(request: WatchFleetRequest, _: object) -> Iterator[WatchFleetResponse]:
        yield WatchFleetResponse(worker=Worker(worker_id="w-1", name="alpha", state=WORKER_STATE_CONNECTED))
        yield WatchFleetResponse(gpu=GPUS[0])
        yield WatchFleetResponse(deleted_gpu_uuid=GPUS[0].gpu.uuid)
        yield WatchFleetResponse(deleted_worker_id="w-1")

    def commands(request: WatchCommandsRequest, _: object) -> Iterator[WatchCommandsResponse]:
        yield WatchCommandsResponse(command=command(COMMAND_STATE_RUNNING))
        yield WatchCommandsResponse(deleted_command_id="c-1")

    watched.answers |= {"WatchFleet": fleet, "WatchCommands": commands}
    name = told[0].split()[0]
    done = leasehold("get", kind, "--watch", "--filter", "worker = alpha")
    assert done.stdout.splitlines() == [*told, f"{name} no longer matches, or was deleted"]


def test_gpus_of_a_host_out_of_contact(leasehold: CommandLine, watched: ScriptedCoordinator) -> None:
    def alpha(state: WorkerState.ValueType, cordon: Cordon | None = None) -> WatchFleetResponse:
        return WatchFleetResponse(worker=Worker(worker_id="w-1", name="alpha", state=state, cordon=cordon))

    def fleet(request: WatchFleetRequest, _: object) -> Iterator[WatchFleetResponse]:
        yield alpha(WORKER_STATE_LOST)
        yield WatchFleetResponse(gpu=GPUS[0])
        yield WatchFleetResponse(bookmark=BOOKMARK)
        yield alpha(WORKER_STATE_LOST)
        yield alpha(WORKER_STATE_CONNECTED, cordon=Cordon(reason="fan"))
        yield WatchFleetResponse(gpu=GPUS[0])

    watched.answers["WatchFleet"] = fleet
    assert leasehold("get", "gpus", "--watch").stdout.splitlines() == [
        "alpha/0 unspecified one (host LOST)",
        "alpha CONNECTED,cordoned",
        "alpha/0 unspecified one",
    ]
    assert leasehold("get", "workers", "--watch").stdout.splitlines() == [
        "alpha LOST",
        "alpha LOST",
        "alpha CONNECTED,cordoned",
    ]
    lines = leasehold("get", "gpus", "--watch", "-o", "json").stdout.splitlines()
    assert [[*json.loads(line)] for line in lines] == [["worker"], ["gpu"], ["worker"], ["gpu"]]


@pytest.mark.parametrize("kind", ["workers", "gpus", "workloads", "commands", "events"])
def test_the_coordinator_filters(leasehold: CommandLine, watched: ScriptedCoordinator, kind: str) -> None:
    assert leasehold("get", kind, "--watch", "--filter", "worker = alpha").code == 0
    requests = WatchFleetRequest, WatchWorkloadsRequest, WatchCommandsRequest, WatchEventsRequest
    (request,) = (request for one in requests for request in watched.asked(one))
    assert request.filter == "worker = alpha"


@pytest.mark.parametrize(
    "arguments",
    ["checkpoints", "gpus alpha/0", "workers alpha", "commands c-1", "workloads --sort-by name", "wl --all"],
)
def test_what_can_not_be_watched_is_a_usage_error(
    leasehold: CommandLine, watched: ScriptedCoordinator, arguments: str
) -> None:
    done = leasehold("get", *arguments.split(), "--watch")
    assert (done.code, done.stdout) == (2, "")
    assert "--watch" in done.stderr


def test_a_restart_of_the_coordinator_is_followed_by_all_entries_again(
    leasehold: CommandLine, watched: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_watch, "AGAIN_S", 0.0)
    fleet = watched.answers["WatchFleet"]

    def restarting(request: WatchFleetRequest, context: grpc.ServicerContext) -> Iterator[WatchFleetResponse]:
        yield from fleet(request, context)
        if len(watched.asked(WatchFleetRequest)) == 1:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TOKEN", "too old")

    watched.answers["WatchFleet"] = restarting
    done = leasehold("get", "workers", "--watch")
    assert done.stdout == 2 * "alpha CONNECTED\nw-1 deleted\n"
    assert (done.code, done.stderr.count("watching again")) == (0, 1)
    watched.requests.clear()
    lines = leasehold("get", "workers", "--watch", "-o", "json").stdout.splitlines()
    assert [[*json.loads(line)] for line in lines].count(["reset"]) == 1
    watched.requests.clear()
    lines = leasehold("get", "gpus", "--watch", "-o", "json").stdout.splitlines()
    kinds = [next(iter(json.loads(line))) for line in lines]
    assert kinds[: kinds.index("reset")].count("worker") == kinds[kinds.index("reset") :].count("worker") == 1
