"""``leasehold events``: the newest events in order, and then each new one once."""

import json
from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1 import event_pb2
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import (
    ListEventsRequest,
    ListEventsResponse,
    WatchEventsRequest,
    WatchEventsResponse,
)
from leasehold.v1.fleet_service_pb2 import ListGpusResponse
from leasehold.v1.gpu_pb2 import Gpu
from leasehold.v1.watch_pb2 import Bookmark
from leasehold.v1.worker_pb2 import FleetGpu
from leasehold_client.cli import get_watch

from tests.client.conftest import CommandLine
from tests.client.scripted_coordinator import ScriptedCoordinator, refuse


def event(number: int, message: str = "") -> Event:
    return Event(
        event_id=f"e-{number}",
        time=Timestamp(seconds=1_800_000_000 + number),
        kind=event_pb2.EVENT_KIND_GPU_HEALTH,
        message=message or f"event {number}",
    )


@pytest.fixture
def eventful(scripted: ScriptedCoordinator) -> ScriptedCoordinator:
    """Events 1 to 3, of which the watch shows 3 again, and then 4."""

    def watch(request: WatchEventsRequest, context: object) -> Iterator[WatchEventsResponse]:
        yield WatchEventsResponse(bookmark=Bookmark(snapshot_end=True))
        yield WatchEventsResponse(event=event(3))
        yield WatchEventsResponse(event=event(4, "two\nlines \x1b[31m"))

    scripted.answers["ListEvents"] = lambda request, context: ListEventsResponse(
        events=[event(3), event(2), event(1)][: request.page_size]
    )
    scripted.answers["WatchEvents"] = watch
    return scripted


def test_the_newest_event_is_the_last_line(leasehold: CommandLine, eventful: ScriptedCoordinator) -> None:
    assert leasehold("events", "--tail", "2").stdout.splitlines() == [
        "2027-01-15T08:00:02Z  GPU_HEALTH        event 2",
        "2027-01-15T08:00:03Z  GPU_HEALTH        event 3",
    ]
    assert leasehold("events", "--tail", "0").stdout == ""
    documents = [json.loads(line) for line in leasehold("events", "-o", "json").stdout.splitlines()]
    assert [one["event_id"] for one in documents] == ["e-1", "e-2", "e-3"]
    assert leasehold("events", "-o", "yaml").stdout.count("---\nevent_id: e-") == 3


def test_each_event_is_shown_once(leasehold: CommandLine, eventful: ScriptedCoordinator) -> None:
    lines = leasehold("events", "-f").stdout.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines] == [
        "event 1",
        "event 2",
        "event 3",
        "two lines \\x1b[31m",
    ]


def test_an_unknown_worker_is_refused(leasehold: CommandLine, scripted: ScriptedCoordinator) -> None:
    scripted.answers["ListEvents"] = lambda request, context: ListEventsResponse()
    scripted.answers["GetWorker"] = lambda request, context: refuse(
        context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_WORKER", "no worker has the id or name 'alpah'"
    )
    result = leasehold("events", "--worker", "alpah")
    assert (result.code, "no worker has the id or name 'alpah'" in result.stderr) == (1, True)


def test_the_coordinator_selects(leasehold: CommandLine, eventful: ScriptedCoordinator) -> None:
    assert leasehold("events", "one", "--worker", "alpha", "--filter", "kind = CORDON", "-f").code == 0
    (listed,) = eventful.asked(ListEventsRequest)
    assert (listed.workload, listed.filter) == ("one", 'kind = CORDON AND worker = "alpha"')
    (watched,) = eventful.asked(WatchEventsRequest)
    assert (watched.workload, watched.worker, watched.filter) == ("id-of-one", "alpha", "kind = CORDON")
    assert leasehold("events", "--since", "2h").code == 0
    assert eventful.asked(ListEventsRequest)[-1].filter.startswith("time >= 20")
    assert eventful.asked(ListEventsRequest)[-1].filter.endswith("+00:00")


def test_without_a_shown_event_a_restart_is_measured_by_the_coordinators_clock(
    leasehold: CommandLine, eventful: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_watch, "AGAIN_S", 0.0)
    quiet = WatchEventsResponse(bookmark=Bookmark(snapshot_end=True))

    def restarting(
        request: WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[WatchEventsResponse]:
        yield quiet
        if len(eventful.asked(WatchEventsRequest)) == 1:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TOKEN", "too old")

    def listed(request: ListEventsRequest, context: object) -> ListEventsResponse:
        is_first = len(eventful.asked(ListEventsRequest)) == 1
        return ListEventsResponse(events=map(event, (3,) if is_first else (4, 3)))

    eventful.answers |= {"WatchEvents": restarting, "ListEvents": listed}
    done = leasehold("events", "-f", "--tail", "0", "-o", "json")
    assert [json.loads(line)["event_id"] for line in done.stdout.splitlines()] == ["e-4"]
    assert eventful.asked(ListEventsRequest)[-1].filter == "time >= 2027-01-15T08:00:03+00:00"


def test_a_restart_of_the_coordinator_loses_and_repeats_no_event(
    leasehold: CommandLine, eventful: ScriptedCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(get_watch, "AGAIN_S", 0.0)
    watch = eventful.answers["WatchEvents"]

    def restarting(
        request: WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[WatchEventsResponse]:
        yield from watch(request, context)
        if len(eventful.asked(WatchEventsRequest)) == 1:
            refuse(context, grpc.StatusCode.INVALID_ARGUMENT, "INVALID_TOKEN", "too old")

    def listed(request: ListEventsRequest, context: object) -> ListEventsResponse:
        is_first = len(eventful.asked(ListEventsRequest)) == 1
        return ListEventsResponse(events=map(event, (3, 2, 1) if is_first else (5, 4, 3)))

    eventful.answers |= {"WatchEvents": restarting, "ListEvents": listed}
    done = leasehold("events", "-f", "-o", "json")
    assert [json.loads(line)["event_id"] for line in done.stdout.splitlines()] == [
        f"e-{n}" for n in range(1, 6)
    ]
    assert done.code == 0
    assert eventful.asked(ListEventsRequest)[-1].filter == "time >= 2027-01-15T08:00:04+00:00"


def test_gpus_in_messages_have_their_short_names(
    leasehold: CommandLine, eventful: ScriptedCoordinator
) -> None:
    uuid = "GPU-00000000-0000-0000-0000-000000000001"
    gpu = FleetGpu(worker_id="w-1", worker_name="alpha", gpu=Gpu(uuid=uuid, slot=1))
    told = event(3)
    told.message = f"GPU {uuid} is busy"
    eventful.answers |= {
        "ListGpus": lambda request, context: ListGpusResponse(gpus=[gpu]),
        "ListEvents": lambda request, context: ListEventsResponse(events=[told]),
        "WatchEvents": lambda request, context: iter([WatchEventsResponse(event=told)]),
    }
    for verb in ("events", "get events", "get events --watch"):
        assert "GPU alpha/1 is busy" in leasehold(*verb.split()).stdout
        assert uuid in leasehold(*verb.split(), "-o", "json").stdout
