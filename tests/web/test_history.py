"""The answers about the past, and how the page keeps them."""

import asyncio
import json
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from leasehold.v1.command_pb2 import Command
from leasehold.v1.command_service_pb2 import ListCommandsRequest, ListCommandsResponse
from leasehold.v1.event_pb2 import Event
from leasehold.v1.event_service_pb2 import ListEventsRequest, ListEventsResponse
from leasehold_coordinator.lists.filter_expression import parse_filter
from leasehold_web import history
from leasehold_web.answers import CONVERSIONS
from leasehold_web.conversions import Conversions
from leasehold_web.entries import Api, Entry
from leasehold_web.guards import SESSION
from playwright.sync_api import Browser, Route, expect

from .browsers import Complaints, next_request, open_page
from .conftest import WebFleet
from .http import Client


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


def test_commands_that_began_before_a_time_and_went_on_in_it_are_asked_for() -> None:
    found = PagedApi(False, False)
    marks(found, start="1000000", end="2000000")
    marks(found, end="2000000")
    ended = '(end_time >= "1970-01-01T00:16:40Z" OR NOT end_time:*)'
    assert found.filters[::2] == [
        f'create_time >= "1970-01-01T00:06:40Z" AND create_time <= "1970-01-01T00:33:20Z" AND {ended}',
        'create_time <= "1970-01-01T00:33:20Z"',
    ]
    assert all(parse_filter(one) for one in found.filters)


@pytest.mark.long
def test_the_answer_about_a_time_has_the_commands_under_way(fleet: WebFleet) -> None:
    client = Client(fleet.url)
    client.log_in(fleet.token)
    command = client.get("/api/commands").json["commands"][0]
    assert command["end_time"] > command["create_time"]

    def names(start: float) -> list[str]:
        found = client.get(f"/api/marks?start={start:.0f}").json["commands"]
        return [one["command_id"] for one in found]

    assert names(command["end_time"] - 1) == [command["command_id"]]
    assert names(command["end_time"] + 1) == []
    assert names(command["create_time"] - 1) == [command["command_id"]]


FORGOTTEN: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  for (const state of ["PENDING", "RUNNING", "SUCCEEDED", "EXPIRED"]) history.commands.set(state, { state });
  history.forget();
  return [...history.commands.keys()];
}"""


@pytest.mark.long
def test_commands_that_may_have_ended_during_a_gap_are_forgotten(
    browser: Browser, web_fleet: WebFleet
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(FORGOTTEN) == ["SUCCEEDED", "EXPIRED"]


RETRIED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {}, "&workload=w-1");
  const told = [];
  const until = async (number) => {
    for (let at = 0; at < 400 && (history.isAsking || window.answers < number); at += 1) {
      await new Promise((done) => setTimeout(done, 50));
    }
    told.push(history.problem);
  };
  history.want(0, Infinity);
  await until(1); // late
  await until(2);
  history.wantNews(0, Infinity);
  await until(3); // late
  await until(4);
  history.wantNews(0, Infinity);
  await until(5); // refused
  history.wantNews(0, Infinity);
  await until(6); // late
  history.end();
  await new Promise((done) => setTimeout(done, 2500));
  return [told, window.answers];
}"""

ANSWERS: Final = """() => {
  const ask = window.fetch;
  window.answers = 0;
  window.fetch = async (path, ...others) => {
    const answer = await ask(path, ...others);
    if (path.startsWith("/api/history")) window.answers += 1;
    return answer;
  };
}"""


@pytest.mark.long
def test_a_failed_answer_for_the_history_is_asked_for_again(browser: Browser, web_fleet: WebFleet) -> None:
    """Until the view is left, and not after a refusal."""
    statuses = [504, 200, 429, 200, 409, 504]

    def tell(route: Route) -> None:
        status = statuses.pop(0)
        found = {"spans": [], "parked": [], "is_truncated": False, "time": 50_000}
        route.fulfill(status=status, json=found if status == 200 else {"message": f"error {status}"})

    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/history?*", tell)
        page.evaluate(ANSWERS)
        again = "The page tries again by itself."
        assert page.evaluate(RETRIED) == [
            [f"error 504. {again}", "", f"error 429. {again}", "", "error 409", f"error 504. {again}"],
            6,
        ]


LANE: Final = """async () => {
  const { miniTimeline } = await import("/static/mini_timeline.js");
  document.body.append(miniTimeline("w-1", () => ({ create_time: 5000, status: {} })).element);
}"""


TICKS: Final = """async () => {
  const { ticksOf } = await import("/static/spans.js");
  return ticksOf(4000, Date.now(), 600).ticks.length;
}"""


@pytest.mark.long
def test_the_lane_of_a_workload_tells_a_failed_answer(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/history?*", lambda route: asked.append(route))

        def answer(**how: Any) -> None:
            next_request(page, asked).fulfill(**how)

        page.evaluate(LANE)
        told = page.locator(".mini [role=status]")
        answer(status=504, json={"message": "no answer in time"})
        expect(told).to_have_text("no answer in time. The page tries again by itself.")
        answer(json={"spans": [], "parked": [], "is_truncated": False, "time": 50_000})
        expect(told).to_be_empty()
        ticks = page.evaluate(TICKS)
        assert 2 <= ticks <= 6, "the workload began in 1970"
