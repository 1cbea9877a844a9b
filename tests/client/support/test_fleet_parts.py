"""The lists of a coordinator in a bundle, and their bounds."""

import json
from typing import Any

import pytest
from leasehold.v1.command_service_pb2 import ListCommandsRequest, ListCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold.v1.fleet_service_pb2 import ListWorkersRequest, ListWorkersResponse
from leasehold.v1.worker_pb2 import Worker
from leasehold_client.support import fleet_parts
from leasehold_client.support.members import MEMBER_LIMIT_BYTES

from tests.client.scripted_coordinator import GPUS, ScriptedCoordinator

pytestmark = pytest.mark.usefixtures("no_settings")


def read(scripted: ScriptedCoordinator, name: str) -> Any:
    """The document of a list."""
    parts = fleet_parts.fleet_parts(scripted.address, None)
    (found,) = (part for part in parts if part.name == f"fleet/{name}.json")
    return json.loads(found.read())


def test_a_whole_list(scripted: ScriptedCoordinator) -> None:
    found = read(scripted, "gpus")
    assert found["is_whole"]
    assert [entry["worker_name"] for entry in found["entries"]] == [gpu.worker_name for gpu in GPUS]


def test_the_pages_of_a_list_are_read_until_it_has_enough(scripted: ScriptedCoordinator) -> None:
    page = ListEventsResponse(events=[Event(event_id="e")] * 1000, next_page_token="next")
    scripted.answers["ListEvents"] = lambda request, context: page
    found = read(scripted, "events")
    assert (found["is_whole"], len(found["entries"])) == (False, fleet_parts.COUNT_LIMIT)
    assert len(scripted.asked(ListEventsRequest)) == 5


def test_a_list_of_empty_pages_ends(scripted: ScriptedCoordinator) -> None:
    page = ListCommandsResponse(next_page_token="next")
    scripted.answers["ListCommands"] = lambda request, context: page
    assert read(scripted, "commands") == {"is_whole": False, "entries": []}
    assert len(scripted.asked(ListCommandsRequest)) == fleet_parts.PAGE_LIMIT


@pytest.mark.parametrize(
    "page",
    [
        ListWorkersResponse(workers=[Worker(name="a" * 100_000)] * 30, next_page_token="next"),
        # A field that this release does not know, of 3 MB.
        ListWorkersResponse.FromString(b"\xfa\x7f\xc0\x8d\xb7\x01" + bytes(3_000_000) + b"\x12\x04next"),
    ],
    ids=["large entries", "unknown fields"],
)
def test_large_pages_end_a_list(scripted: ScriptedCoordinator, page: ListWorkersResponse) -> None:
    assert page.next_page_token == "next"
    scripted.answers["ListWorkers"] = lambda request, context: page
    found = read(scripted, "workers")
    assert not found["is_whole"]
    assert len(json.dumps(found)) < MEMBER_LIMIT_BYTES
    assert len(scripted.asked(ListWorkersRequest)) == 2
