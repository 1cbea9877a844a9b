"""The answers about the past, without a server."""

import asyncio
import json
from types import MappingProxyType, SimpleNamespace
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest, ListCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold_web import history
from leasehold_web.answers import CONVERSIONS
from leasehold_web.conversions import Conversions
from leasehold_web.entries import Api, Entry
from leasehold_web.guards import SESSION


class PagedApi:
    """Commands and events whose list has further pages."""

    def __init__(self, more_commands: bool, more_events: bool) -> None:
        self._tokens = ["more" if one else "" for one in (more_commands, more_events)]
        self.filters: list[str] = []

    async def ListCommands(self, request: ListCommandsRequest, **call: Any) -> ListCommandsResponse:
        self.filters.append(request.filter)
        found = [Command(command_id=f"c-{at}", create_time=Timestamp(seconds=at)) for at in (9, 4)]
        return ListCommandsResponse(commands=found, next_page_token=self._tokens[0])

    async def ListEvents(self, request: ListEventsRequest, **call: Any) -> ListEventsResponse:
        self.filters.append(request.filter)
        found = [Event(event_id=f"e-{at}", time=Timestamp(seconds=at)) for at in (8, 7)]
        return ListEventsResponse(events=found, next_page_token=self._tokens[1])


def marks(found: PagedApi, **query: str) -> Any:
    """The answer with commands and events."""
    service: Any = found

    async def api() -> Api:
        return Api(*[service] * len(Api._fields))

    async def leave() -> None:
        pass

    class Request(dict[Any, Any]):
        app = MappingProxyType({CONVERSIONS: Conversions()})

    async def story() -> Any:
        request: Any = Request({SESSION: SimpleNamespace(entry=Entry("ann", api, object(), b"", leave))})
        request.query = query
        return json.loads((await history.get_marks(request)).body or b"")  # type: ignore[arg-type]

    return asyncio.run(story())


def test_truncated_marks_say_since_when_they_are_complete() -> None:
    """The lists have the latest entries first."""
    assert "complete_from" not in marks(PagedApi(False, False))
    assert marks(PagedApi(True, False))["complete_from"] == 4_000
    assert marks(PagedApi(False, True))["complete_from"] == 7_000
    assert marks(PagedApi(True, True))["complete_from"] == 7_000
