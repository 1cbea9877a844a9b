"""The line on a lost contact or a refused login, in a real browser."""

import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, expect

from .browsers import SCRIPTED_STREAM, open_page
from .conftest import WebFleet

CLOCK: Final = "Date.now = () => window.at ?? 0;"
"""The test sets the time."""

REFUSED: Final = {"refused": {"message": "user/ann has no role"}}


def clock(page: Page, at: int) -> str:
    """A time as the page writes it."""
    found: str = page.evaluate("async (at) => (await import('/static/words.js')).when(at)", at)
    return found


@pytest.mark.long
def test_the_page_says_which_state_it_shows(browser: Browser, web_fleet: WebFleet) -> None:
    """Neither a refusal nor a lost contact is news of the fleet."""
    shown, lost, *later = range(60_000, 360_000, 60_000)
    changes = [["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}]]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(at: int, message: dict[str, object]) -> None:
            page.evaluate("([at, message]) => { window.at = at; tell(message); }", [at, message])

        session = {"identity": "user/ann", "role": "VIEWER"}  # without the server's time
        page.route("**/api/session", lambda route: route.fulfill(json=session))
        page.add_init_script(SCRIPTED_STREAM + CLOCK)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        contact = page.locator("#contact")
        tell(1_000, {"reset": {}, "state": {"is_loading": True, **REFUSED}})
        expect(contact).to_have_text(
            "The coordinator refuses this login now: user/ann has no role. The page tries again by itself."
        )
        tell(2_000, {"reset": {}, "changes": changes, "state": {}})
        expect(contact).to_be_empty()
        tell(shown, {})  # nothing has changed
        tell(later[0], {"reset": {}, "state": {"is_loading": True, **REFUSED}})
        shows = f"The page shows the state of {clock(page, shown)}, and"
        expect(contact).to_contain_text(f"no role. {shows} tries again by itself.")
        tell(later[1], {"reset": {}, "state": {"lost": {"since": lost, "message": ""}}})
        since = f"No contact with the coordinator since {clock(page, lost)}."
        expect(contact).to_have_text(f"{since} {shows} connects again by itself.")
        # Another window of the same user has kept the server's view of before the outage.
        tell(later[2], {"reset": {}, "changes": changes, "state": {"lost": {"since": lost, "message": ""}}})
        expect(contact).to_contain_text(f"The page shows the state of {clock(page, lost)}, and")


FAILING_STREAM: Final = """
window.EventSource = class {
  constructor() {
    setTimeout(() => this.onerror(), 0);
  }
  close() {}
};
"""


@pytest.mark.long
def test_a_window_without_a_stream_says_why(browser: Browser, web_fleet: WebFleet) -> None:
    """A browser hides the answer to a stream that the server refuses."""
    told = {"identity": "user/ann", "role": "VIEWER"}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/session", lambda route: route.fulfill(json=told))
        page.add_init_script(FAILING_STREAM)
        page.reload()
        contact = page.locator("#contact")
        expect(contact).to_have_text("No contact yet. The page connects again by itself.")
        told["full"] = "16 streams of this user are open"
        expect(contact).to_have_text(
            "No contact yet (16 streams of this user are open). The page connects again by itself."
        )


UNANSWERED: Final = """async () => {
  const { ask } = await import("/static/dom.js");
  window.fetch = (path, { signal }) => new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
  });
  const closed = new AbortController();
  const told = [];
  ask("/api/one", { signal: closed.signal }).catch((error) => told.push(error.name));
  closed.abort();
  ask("/api/two").catch((error) => told.push(error.message));
  window.told = told;
}"""


@pytest.mark.long
def test_a_request_that_the_browser_never_sends_ends(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.clock.install()
        page.evaluate(UNANSWERED)
        page.clock.fast_forward(66_000)
        page.wait_for_function("() => told.length === 2")
        assert page.evaluate("told") == [
            "AbortError",
            "no answer from the server in time: if many windows of this page are open, close some",
        ]


DATES: Final = """async () => {
  const { eventsView } = await import("/static/events_view.js");
  const { textOf } = await import("/static/timeline_words.js");
  const day = 24 * 3600000;
  const now = Date.now();
  const span = { state: "LEASED", workload_name: "train", begin_time: now - day, end_time: now };
  const texts = [textOf({ span })[1], eventsView([{ time: now - day }, { time: now }]).innerHTML];
  return texts.map((text) => text.replaceAll(/title="[^"]*"/g, "").match(/[0-9]{4}, [0-9:]{8}/g).length);
}"""


@pytest.mark.long
def test_a_past_day_has_its_date(browser: Browser, web_fleet: WebFleet) -> None:
    """A time of today has none."""
    noon = 12 * 3_600_000
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")  # the server's time is known
        page.evaluate(f"Date.now = () => {100 * 24 * 3_600_000 + noon}")
        assert page.evaluate(DATES) == [1, 1]


SKEWED: Final = "const real = Date.now; Date.now = () => real() + 5 * 3600000;"
"""A clock of the browser that is wrong by hours."""

SKEWS: Final = """async () => {
  const { learnTime, now } = await import("/static/server_time.js");
  Date.now = () => 100000;
  return [120000, 80000, 95000, 100500].map((time) => {
    learnTime(time, 90000, 100000);
    return now();
  });
}"""


@pytest.mark.long
def test_times_are_told_by_the_clock_of_the_server(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.add_init_script(SKEWED)
        page.goto(f"{fleet.url}commands")
        age = page.locator(".command time")
        expect(age).to_have_text(re.compile(r"\d+ (s|min) ago"))
        # Neither the way of an answer nor a small difference counts.
        assert page.evaluate(SKEWS) == [120_000, 90_000, 100_000, 100_000]
