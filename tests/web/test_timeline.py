"""The timeline in a real browser: what it learns after its first answer."""

import re
import signal
import time
from typing import Any, Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page
from .conftest import WebFleet

CLOCK: Final = "const real = Date.now; Date.now = () => real() + %d;"
"""A clock of the browser that differs from that of the server, by ms."""

SLOW_MS: Final = 20_000


@pytest.mark.long
@pytest.mark.parametrize("skew_ms", [0, 60_000, -SLOW_MS])
def test_a_followed_timeline_learns_the_end_of_each_lease(
    browser: Browser, fleet: WebFleet, skew_ms: int
) -> None:
    """At 1 h, the picture ends 72 s after now."""
    with open_page(browser, fleet.url, fleet.token) as page:
        page.add_init_script(CLOCK % skew_ms)
        page.goto(f"{fleet.url}timeline?range=3600000")
        page.click('button:text-is("Table")')
        # On a busy machine, reserved spans are seen too.
        rows = page.locator("tbody tr", has_text="train").filter(has=page.locator('td:text-is("leased")'))
        open_rows = rows.filter(has=page.locator('td:text-is("now")'))
        for number, verb in enumerate(("suspend", "restore", "suspend", "restore", "suspend")):
            fleet.fleet.cli(verb, "train")
            expect(rows).to_have_count(1 + (number + 1) // 2)
            expect(open_rows).to_have_count(number % 2)
        # Only a past length is told.
        expect(rows.locator("td:last-child", has_text=re.compile("[0-9]"))).to_have_count(3)
        fleet.fleet.cli("restore", "train")
        expect(open_rows.locator("td:last-child")).to_have_text([""])


HISTORY: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  const told = [];
  for (const [start, end] of [[0, Infinity], [0, Infinity], [0, 40000]]) {
    await history.want(start, end);
    const spans = [...history.spans.values()];
    told.push(spans.map((one) => `${one.span_id} ${one.end_time ?? "open"}`).join(", "));
  }
  return told;
}"""


@pytest.mark.long
def test_an_open_span_that_an_answer_lacks_is_asked_for_from_its_begin(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """The clock of the server that answers may differ from that of the coordinator, which names the times."""
    begun = [{"span_id": "ended", "begin_time": 5_000}, {"span_id": "deleted", "begin_time": 6_000}]
    goes_on = {"span_id": "goes on", "begin_time": 7_000}
    ended = {"span_id": "ended", "begin_time": 5_000, "end_time": 9_000}
    answers = [[*begun, goes_on], [goes_on], [ended, goes_on]]
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        route.fulfill(json={"spans": answers.pop(0), "parked": [], "is_truncated": False, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        assert page.evaluate(HISTORY) == [
            "ended open, deleted open, goes on open",
            "ended 9000, goes on open",
            "ended 9000, goes on open",
        ]
    assert asked == ["start=0", "start=47000", "start=4999"]


TRUNCATED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  const told = [];
  const load = (start, end) => (start ? history.want(start, end) : history.wantNews(1000, Infinity));
  for (const [start, end] of [[], [], [2000, 20000], [2000, 3000]]) {
    await load(start, end);
    told.push([...history.spans.keys(), history.isCut(1500)].join(" "));
  }
  return told;
}"""


@pytest.mark.long
def test_the_time_before_a_truncated_answer_is_loaded_once_it_is_looked_at(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """Spans come in the order of their ends, so a truncated answer is complete from its first end on."""
    goes_on = {"span_id": "on", "begin_time": 2_500}
    late = {"span_id": "late", "begin_time": 1_800, "end_time": 9_000}
    early = {"span_id": "early", "begin_time": 1_900, "end_time": 4_000}
    answers = [([goes_on, late], True), ([goes_on], False), ([goes_on, late, early], False)]
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        spans, is_truncated = answers.pop(0)
        route.fulfill(json={"spans": spans, "parked": [], "is_truncated": is_truncated, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        assert page.evaluate(TRUNCATED) == ["on late true"] * 2 + ["on late early false"] * 2
    assert asked == ["start=1000", "start=47000", "start=2000&end=9000"]


OVERTAKEN: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  await history.want(9000, Infinity);
  const news = history.wantNews(9000, Infinity);
  history.want(2000, 3000);
  history.wantNews(2000, Infinity);
  await news; // fails
  await history.wantNews(2000, Infinity);
  await history.wantNews(2000, 3000); // nothing is new there
  const later = history.wantNews(2000, Infinity);
  history.forget();
  await later;
  await history.wantNews(4000, 5000);
}"""


@pytest.mark.long
def test_a_change_overtakes_no_time_that_is_looked_at(browser: Browser, web_fleet: WebFleet) -> None:
    """Changes come all the time in a busy fleet. After a gap, all of the shown time is asked for again."""
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        if len(asked) == 3:
            route.fulfill(status=503, json={})
        else:
            route.fulfill(json={"spans": [], "parked": [], "is_truncated": False, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/history?*", tell)
        page.evaluate(OVERTAKEN)
    old = "start=2000&end=3000"
    assert asked[:4] == ["start=9000", "start=47000", old, old]
    assert asked[4:] == ["start=2000", "start=47000", "start=4000&end=5000"]


@pytest.mark.long
def test_the_note_on_a_truncated_timeline_stays_after_a_change(browser: Browser, web_fleet: WebFleet) -> None:
    late = {**LEASED, "worker_name": "alpha", "begin_time": 1_800, "end_time": 1_000 * time.time()}
    is_truncated = True  # until the note is there, since the arrival of the session may repeat the first load

    def tell(route: Route) -> None:
        answer = {"spans": [late], "parked": [], "is_truncated": is_truncated, "time": 1_000 * time.time()}
        route.fulfill(json=answer)

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}timeline")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        note = page.locator(".timeline-tools [role=status]")
        expect(note).to_have_text("More happened than fits: zoom in.")
        is_truncated = False
        with page.expect_response("**/api/history?*"):
            page.evaluate("tell", {"reset": {}, "changes": [], "state": {}})
        page.wait_for_timeout(100)
        expect(note).to_have_text("More happened than fits: zoom in.")


@pytest.mark.long
def test_a_time_before_1970_is_not_truncated(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        with page.expect_response("**/api/history?*"):
            page.goto(f"{web_fleet.url}timeline?end=1")
        page.wait_for_timeout(100)
        expect(page.locator(".timeline-tools [role=status]")).to_have_text("")


LANE: Final = """async (status) => {
  const { miniTimeline } = await import("/static/mini_timeline.js");
  const draw = CanvasRenderingContext2D.prototype.roundRect;
  CanvasRenderingContext2D.prototype.roundRect = function (x, y, width, ...others) {
    window.barWidth = width;
    draw.call(this, x, y, width, ...others);
  };
  const lane = miniTimeline("w-1", () => ({ create_time: 5000, status }));
  document.body.append(lane.element);
}"""

LEASED: Final = {
    "span_id": "leased",
    "state": "LEASED",
    "begin_time": 6_000,
    "end_time": 8_000,
    "gpu_uuid": "GPU-1",
    "workload_id": "w-1",
}


@pytest.mark.long
def test_the_lane_of_an_ended_workload_begins_with_it_and_shows_its_leases(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A page that has not seen the workload live has it from the coordinator alone."""
    reserved = {"span_id": "reserved", "state": "RESERVED", "begin_time": 5_500, "end_time": 6_000}
    spans = [{**LEASED, **reserved}, LEASED]
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        route.fulfill(json={"spans": spans, "parked": [], "is_truncated": False, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.evaluate(LANE, {"state": "EXITED", "end_time": 9_000})
        expect(page.locator(".mini tbody tr")).to_have_count(1)
        expect(page.locator(".mini canvas")).to_have_attribute("aria-label", re.compile(": 1 stay[.]"))
        expect(page.get_by_text("latest stays only")).to_be_hidden()
    assert asked == ["start=4000&workload=w-1"]


@pytest.mark.long
@pytest.mark.parametrize("state", ["EXITED", "SUSPENDED"])
def test_the_lane_of_an_old_workload_has_its_whole_past(
    browser: Browser, web_fleet: WebFleet, state: str
) -> None:
    """The end of another owner's workload is hidden, so its lane ends with its last lease."""
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        route.fulfill(json={"spans": [LEASED], "parked": [], "is_truncated": True, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.evaluate(LANE, {"state": state})
        expect(page.locator(".mini canvas")).to_have_attribute("aria-label", re.compile(": 1 stay[.]"))
        expect(page.get_by_text("latest stays only")).to_be_visible()
        assert (page.evaluate("barWidth") > 100) == (state == "EXITED")
    assert asked == ["start=4000&workload=w-1"]


PAST: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { layOut } = await import("/static/timeline_rows.js");
  const { textOf } = await import("/static/timeline_words.js");
  const whole = new History(() => {});
  await whole.want(0, Infinity);
  const parked = [...whole.spans.values()].find((one) => one.parked);
  const { begin_time: begin, end_time: end } = parked;
  const middle = (begin + end) / 2;
  const windows = [
    [begin - 300, middle], [begin + 50, middle], [middle, end + 300], [begin - 300, end + 300],
    [begin - 300, begin - 150], [end + 150, end + 300],
  ];
  const told = [];
  for (const [start, until] of windows) {
    const history = new History(() => {});
    await history.want(start, until);
    const { joints, spans } = layOut(history, { start, end: until }, []);
    told.push([...joints.map((joint) => {
      const text = textOf({ joint })[1].includes("; then restored on alpha/") ? "restored" : "parked";
      return [text, joint.from.slot ?? 0, joint.to ? joint.to.slot ?? 0 : "-"].join(" ");
    }), ...spans.filter((one) => one.state === "LEASED").map((one) => `leased ${one.slot ?? 0}`)].join(", "));
  }
  return told;
}"""


@pytest.mark.long
def test_each_part_of_a_past_parked_time_has_its_line(browser: Browser, fleet: WebFleet) -> None:
    """The workload has ended, and a page that was not open knows it from the stored history alone."""
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("restore", "train", "--to", "alpha/2")
    fleet.fleet.cli("stop", "train")
    with open_page(browser, fleet.url, fleet.token) as page:
        assert page.evaluate(PAST) == [
            "parked 0 -, leased 0",
            "parked 0 -",
            "restored 0 2, leased 2",
            "restored 0 2, leased 0, leased 2",
            "leased 0",
            "leased 2",
        ]


@pytest.mark.long
def test_a_workload_that_is_stopped_while_it_is_parked_was_parked_until_then(
    browser: Browser, fleet: WebFleet
) -> None:
    fleet.fleet.cli("suspend", "train")
    with open_page(browser, fleet.url, fleet.token) as page:
        told = """async () => {
          const { History } = await import("/static/history.js");
          const { jointsOf } = await import("/static/spans.js");
          const { textOf } = await import("/static/timeline_words.js");
          const history = new History(() => {});
          await history.want(0, Infinity);
          return jointsOf(history.spans.values()).map((joint) => textOf({ joint })[1]);
        }"""
        (since,) = page.evaluate(told)
        assert re.fullmatch(r"since [0-9:]+", since)
        fleet.fleet.cli("stop", "train")
        (until,) = page.evaluate(told)
        assert re.fullmatch(r"from [0-9:]+ to [0-9:]+, [0-9.]+ m?s", until)


@pytest.mark.long
def test_a_time_that_rests_learns_the_ends_of_its_leases(browser: Browser, fleet: WebFleet) -> None:
    """The time has no news, but a lease that went on at its end does."""
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}timeline?range=600000&end={int(1000 * time.time())}")
        page.click('button:text-is("Table")')
        row = page.locator("tbody tr", has_text="train").filter(has=page.locator('td:text-is("leased")'))
        expect(row.locator("td").nth(4)).to_have_text("now")
        fleet.fleet.cli("suspend", "train")
        expect(row.locator("td").nth(4)).to_have_text(re.compile("[0-9]+:[0-9]+"))
        page.fill("input[type=search]", "zzz")
        expect(page.locator("main .page")).to_have_text(re.compile("^No span from .* matches the filter\\.$"))
        expect(page.locator('button:text-is("Follow now")')).to_be_visible()  # it rests


CROWDED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  const told = [];
  await history.want(1000, Infinity);
  for (let at = 0; at < 3; at += 1) {
    await history.wantNews(1000, Infinity);
    const spans = [...history.spans.values()];
    const shown = spans.map((one) => `${one.span_id} ${one.end_time ?? "open"}`).join(", ");
    told.push(`${shown} ${history.isCut(20000)} ${history.lacksParked}`);
  }
  return told;
}"""


@pytest.mark.long
def test_many_parked_workloads_and_many_ends_leave_no_lease_open(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """Open spans come first, so a truncated answer with an end has all of them."""
    lease = {"span_id": "lease", "begin_time": 2_000}
    parked = {"span_id": "parked", "begin_time": 3_000, "parked": True}
    other = {"span_id": "other", "begin_time": 48_000, "end_time": 50_000}
    late = {"span_id": "late", "begin_time": 4_000}
    answers: list[dict[str, Any]] = [
        {"spans": [lease, late], "parked": [parked], "is_parked_truncated": True, "time": 50_000},
        {"spans": [late], "parked": [parked], "is_parked_truncated": True, "time": 51_000},
        {"spans": [late, {**lease, "end_time": 40_000}], "parked": [parked], "time": 51_000},
        {"spans": [late], "parked": [], "is_parked_truncated": True, "time": 52_000},
        {"spans": [other], "is_truncated": True, "parked": [], "time": 53_000},
        {"spans": [other], "is_truncated": True, "parked": [], "time": 53_000},
        {"spans": [other], "is_truncated": True, "parked": [], "time": 53_000},  # all anew
    ]

    def tell(route: Route) -> None:
        route.fulfill(json={"is_truncated": False, **answers.pop(0)})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        assert page.evaluate(CROWDED) == [
            "lease 40000, late open, parked open false true",
            "lease 40000, late open, parked open false true",
            "other 50000 true false",
        ]
    assert answers == []


OLDER_PARKED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  const told = [];
  for (const start of [1000, 20000, 1000]) {
    await history.want(start, 45000);
    const ids = [...history.spans.keys()].sort().join(", ");
    told.push(`${ids} ${history.isCut(start)}`);
  }
  return told;
}"""


@pytest.mark.long
def test_parked_times_that_did_not_fit_are_loaded_once_they_are_looked_at(
    browser: Browser, web_fleet: WebFleet
) -> None:
    late, middle, early = (
        {"span_id": f"p-{end}", "begin_time": end - 1_000, "end_time": end, "parked": True}
        for end in (40_000, 30_000, 10_000)
    )
    answers = [([late], True), ([middle], False), ([early, middle], False)]
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        found, is_truncated = answers.pop(0)
        document = {"spans": [], "is_truncated": False, "parked": found, "time": 50_000}
        route.fulfill(json={**document, "is_parked_truncated": is_truncated})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        assert page.evaluate(OLDER_PARKED) == [
            "p-40000 true",
            "p-30000, p-40000 false",
            "p-10000, p-30000, p-40000 false",
        ]
    assert asked == ["start=1000&end=45000", "start=20000&end=40000", "start=1000&end=20000"]


RESTING: Final = """async () => {
  const { History } = await import("/static/history.js");
  const history = new History(() => {});
  const told = [];
  await history.want(1000, 9000);
  for (let at = 0; at < 4; at += 1) {
    await history.wantNews(1000, 9000);
    const spans = [...history.spans.values()];
    told.push(spans.map((one) => `${one.span_id} ${one.end_time ?? "open"}`).join(", "));
  }
  return told;
}"""


@pytest.mark.long
def test_a_time_that_rests_asks_for_ends_only_and_loads_anew_after_too_many(
    browser: Browser, web_fleet: WebFleet
) -> None:
    spans = [{"span_id": one, "begin_time": 2_000} for one in ("first", "second")]
    ends = [{**one, "end_time": end} for one, end in zip(spans, (52_000, 70_000), strict=True)]
    answers: list[tuple[list[dict[str, object]], bool, int]] = [
        (spans, False, 50_000),  # type: ignore[list-item]  # the values differ
        ([ends[0], spans[1]], False, 60_000),  # type: ignore[list-item]
        ([], True, 71_000),
        (ends, False, 72_000),  # type: ignore[list-item]
    ]
    asked: list[str] = []

    def tell(route: Route) -> None:
        asked.append(route.request.url.partition("?")[2])
        found, is_truncated, time_ms = answers.pop(0)
        route.fulfill(json={"spans": found, "parked": [], "is_truncated": is_truncated, "time": time_ms})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        over = "first 52000, second 70000"
        assert page.evaluate(RESTING) == ["first 52000, second open", over, over, over]
    assert asked == [
        *("start=1000&end=9000", "start=47000&end=9000", "start=57000&end=9000"),
        "start=1000&end=9000",
    ]


REAL_JOINTS: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { jointsOf } = await import("/static/spans.js");
  const history = new History(() => {});
  await history.want(0, Infinity);
  return jointsOf(history.spans.values(), history.commands.values()).map(
    (one) => [one.kind, one.from.slot ?? 0, one.to.slot ?? 0].join(" ") + (one.isGuess ? " guess" : ""));
}"""


@pytest.mark.long
def test_a_move_is_told_apart_from_a_suspend_and_a_restore_right_after(
    browser: Browser, fleet: WebFleet
) -> None:
    fleet.fleet.cli("remap", "train", "--to", "alpha/2")
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("restore", "train", "--to", "alpha/1")
    with open_page(browser, fleet.url, fleet.token) as page:
        assert sorted(page.evaluate(REAL_JOINTS)) == ["move 0 2", "parked 2 1"]


LAID_OUT: Final = """async (words) => {
  const { History } = await import("/static/history.js");
  const { layOut } = await import("/static/timeline_rows.js");
  const history = new History(() => {});
  await history.want(0, Infinity);
  return layOut(history, { start: 0, end: Date.now() + 1000 }, words).joints.map(
    (one) => [one.kind, one.from.slot ?? 0, one.to.slot ?? 0].join(" ") + (one.isGuess ? " guess" : ""));
}"""

CURVES: Final = """window.curves = new Set();
const draw = CanvasRenderingContext2D.prototype.bezierCurveTo;
CanvasRenderingContext2D.prototype.bezierCurveTo = function (...at) {
  window.curves.add(`${(at[1] - 35) / 30} ${(at[3] - 35) / 30}`);
  draw.apply(this, at);
};"""
"""The rows that the curves of a lane join."""


@pytest.mark.long
def test_the_curves_of_a_move_are_the_pairs_of_its_command(browser: Browser, web_fleet: WebFleet) -> None:
    fleet = web_fleet.fleet
    fleet.start_worker("alpha")
    fleet.run_counter("two", gpus=2)
    fleet.cli("remap", "two", "--pair", "alpha/0=alpha/3", "--pair", "alpha/1=alpha/2")
    fleet.cli("remap", "two", "--pair", "alpha/3=alpha/2", "--pair", "alpha/2=alpha/3")
    fleet.cli("suspend", "two")
    fleet.cli("restore", "two")
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        pairs = ["move 0 3", "move 1 2", "move 2 3", "move 3 2", "parked 2 2", "parked 3 3"]
        assert sorted(page.evaluate(REAL_JOINTS)) == pairs
        assert sorted(page.evaluate(LAID_OUT, [])) == pairs
        page.add_init_script(CURVES)
        page.goto(f"{web_fleet.url}workloads/two")
        page.wait_for_function("() => curves.size >= 4")
        assert sorted(page.evaluate("[...curves]")) == ["0 3", "1 2", "2 3", "3 2"]


@pytest.mark.long
def test_a_filter_joins_no_stays_around_a_hidden_one(browser: Browser, web_fleet: WebFleet) -> None:
    """The filter shows a GPU on which a workload was twice, and hides the GPU where it was between."""
    fleet = web_fleet.fleet
    fleet.start_worker("alpha")
    fleet.run_counter("mover")
    for slot in (1, 0, 1, 0):
        fleet.cli("remap", "mover", "--to", f"alpha/{slot}")
    fleet.run_counter("later")
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        moves = ["move 0 1", "move 0 1", "move 1 0", "move 1 0"]
        assert sorted(page.evaluate(LAID_OUT, ["mover"])) == moves
        assert page.evaluate(LAID_OUT, ["later"]) == []


GUESS: Final = """async () => {
  const { textOf } = await import("/static/timeline_words.js");
  const { jointsOf } = await import("/static/spans.js");
  const span = (slot, begin, end) => ({
    workload_id: "w-1", workload_name: "two", worker_name: "alpha", slot, gpu_uuid: String(slot),
    state: "LEASED", lease_id: String(begin), begin_time: begin, end_time: end,
  });
  const stays = [span(0, 0, 9000), span(1, 0, 9000), span(2, 9000, 20000), span(3, 9000, 20000),
    span(0, 60000), span(1, 60000)];
  return jointsOf(stays).map((joint) => textOf({ joint })[1]);
}"""


@pytest.mark.long
def test_a_joint_of_unknown_pairs_names_all_its_gpus(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        texts = page.evaluate(GUESS)
    assert len(texts) == 4
    assert all(one.startswith("from alpha/0, alpha/1 to alpha/2, alpha/3 at ") for one in texts[:2])
    assert all(one.endswith("; then restored on alpha/0, alpha/1") for one in texts[2:])


RANGE_THEN_LINK: Final = """() => {
  document.querySelector('button[data-range="60000"]').click();
  document.querySelector('#views a[href="/commands"]').click();
}"""


@pytest.mark.long
def test_the_address_of_a_timeline_has_the_time_that_it_shows(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}timeline")
        page.click('button:text-is("1 h")')
        page.wait_for_url("**/timeline?range=3600000")
        page.click('button:text-is("Following now")')
        page.wait_for_url("**/timeline?range=3600000&end=*")
        address = page.url
        page.reload()
        expect(page.locator('button[data-range="3600000"]')).to_have_attribute("aria-pressed", "true")
        page.click('button:text-is("Follow now")')  # it rests after the reload, too
        page.wait_for_url("**/timeline?range=3600000")
        page.evaluate(RANGE_THEN_LINK)
        page.wait_for_url("**/commands")
        page.go_back()
        page.wait_for_url("**/timeline?range=60000")
        page.goto(f"{fleet.url}timeline?range=60000&end=x")
        expect(page.locator('button:text-is("Following now")')).to_be_visible()
        assert int(address.rpartition("=")[2]) > 0


COMMAND_BARS: Final = """async () => {
  const { drawLanes } = await import("/static/timeline_lanes.js");
  const { coloursOf } = await import("/static/painter.js");
  const hour = 3600000;
  const begin = Date.now() - hour;
  const command = (state, fields) =>
    ({ command_id: state, state, create_time: begin, operation: { stop: {} }, ...fields });
  const commands = [
    command("RUNNING"), command("SUCCEEDED"), command("FAILED"),
    command("CANCELLED", { end_time: begin + hour }),
  ];
  const scale = { labels: 0, xOf: (time) => ((time - begin) / hour) * 1000 };
  const context = document.createElement("canvas").getContext("2d");
  const hits = drawLanes(context, 2000, scale, coloursOf(document.body), commands, []);
  return hits.filter((one) => one.x2 > 500).map((one) => one.item.command.state);
}"""


@pytest.mark.long
def test_an_ended_command_whose_end_is_hidden_does_not_go_on(browser: Browser, web_fleet: WebFleet) -> None:
    """A user sees the state of others' commands, and not their end."""
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(COMMAND_BARS) == ["RUNNING", "CANCELLED"]


LAST_REPORT: Final = """async (worker) => {
  const { live } = await import("/static/live.js");
  const { lastReportOf, textOf } = await import("/static/timeline_words.js");
  const { coloursOf, drawSpan } = await import("/static/painter.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  live.workers.set("worker-a", { worker_id: "worker-a", name: "alpha", ...worker });
  const place = { worker_id: "worker-a", worker_name: "alpha" };
  const span = { span_id: "s-1", state: "LEASED", begin_time: 10, ...place };
  const bars = [];
  const context = document.createElement("canvas").getContext("2d");
  const kind = () => (context.globalAlpha < 1 ? "dim" : "full");
  context.roundRect = (x, y, width) => bars.push([x, x + width, kind()].join(" "));
  drawSpan(context, span, 10, 90, 50, coloursOf(document.body), { dimFrom: lastReportOf(span) });
  return [/until now/.test(textOf({ span })[1]), /[(]last known[)]/.test(textOf({ span })[1]), ...bars];
}"""


@pytest.mark.long
def test_a_lease_of_a_host_out_of_contact_is_last_known(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        assert page.evaluate(LAST_REPORT, {"state": "CONNECTED"}) == [True, False, "10 90 full"]
        lost = {"state": "LOST", "last_seen_time": 60}
        assert page.evaluate(LAST_REPORT, lost) == [False, True, "10 90 dim", "10 60 full"]
        unconfirmed = {"state": "UNCONFIRMED"}
        assert page.evaluate(LAST_REPORT, unconfirmed) == [False, True, "10 90 dim"]
        page.goto(f"{fleet.url}timeline")
        page.click('button:text-is("Table")')
        row = page.locator("tbody tr", has_text="train").filter(has=page.locator('td:text-is("leased")'))
        lane = page.context.new_page()
        lane.goto(f"{fleet.url}workloads/train")
        expect(row).to_contain_text("now")
        expect(lane.locator(".mini tbody tr")).to_contain_text("now")
        fleet.fleet.processes["alpha"].send_signal(signal.SIGSTOP)
        try:
            expect(row).to_contain_text("(last known)")
            expect(lane.locator(".mini tbody tr")).to_contain_text("(last known)")
        finally:
            fleet.fleet.processes["alpha"].send_signal(signal.SIGCONT)
        expect(row).to_contain_text("now")


STALE: Final = """async (contact) => {
  const { live } = await import("/static/live.js");
  const { lastReportOf } = await import("/static/timeline_words.js");
  const { drawPicture } = await import("/static/timeline_picture.js");
  const { coloursOf } = await import("/static/painter.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const known = { isConnected: true, seenAt: 500, shownAt: 400, lost: null, refused: null };
  Object.assign(live, known, contact);
  live.workers.set("silent", { worker_id: "silent", state: "LOST", last_seen_time: 300 });
  live.workers.set("here", { worker_id: "here", state: "CONNECTED" });
  live.workers.set("unheard", { worker_id: "unheard", state: "UNCONFIRMED" });
  const span = (worker_id, end_time) =>
    ({ span_id: worker_id, gpu_uuid: worker_id, worker_id, begin_time: 10, end_time, state: "LEASED" });
  const joint = { workload: "w-1", kind: "parked", begin: 100, end: Infinity, to: null };
  const joints = ["here", "silent", "unheard"].map((one) => ({ ...joint, from: span(one, 100) }));
  const states = [{ state: "PENDING" }, { state: "UNKNOWN", worker_id: "unheard" }];
  const commands = states.map((one) => ({ ...one, create_time: 100, operation: { stop: {} } }));
  const placed = new Map([["here", 20], ["silent", 60], ["unheard", 90]]);
  const layout = { rows: [], spans: [], joints, placed };
  const hits = drawPicture(document.createElement("canvas"), { width: 1000, height: 400, scrollTop: 0 }, {
    time: { start: 0, end: 900, scale: () => ({ labels: 0, xOf: (one) => one }) },
    layout, colours: coloursOf(document.body), commands, events: [], empty: "",
  });
  return [lastReportOf(span("here")), lastReportOf(span("silent")), ...hits.map((one) => one.x2)];
}"""


@pytest.mark.long
def test_without_contact_the_timeline_ends_with_the_shown_state(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A lease is dim from there on, and a parked time and a command end there."""
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        present = page.evaluate(STALE, {})
        assert present[:5] == [None, 300, 900, 300, 900]
        assert min(present[5:7]) > 900
        for contact in ({"isConnected": False}, {"lost": {"since": 1}}, {"refused": {"message": ""}}):
            assert page.evaluate(STALE, contact) == [400, 300, 400, 300, 400, 400, 400]
        assert page.evaluate(STALE, {"isConnected": False, "seenAt": 0})[:2] == [None, 300]


FINGERS: Final = """async (events) => {
  const { listen } = await import("/static/timeline_input.js");
  const canvas = document.createElement("canvas");
  canvas.setPointerCapture = () => {};
  const told = new Set();
  const tell = (kind) => () => told.add(kind);
  listen(canvas, {
    scale: () => ({ timeAt: () => 0, perPixel: 1 }), range: () => 1000, itemAt: () => null, point: () => {},
    leave: () => {}, press: tell("press"), pan: tell("pan"), zoomTo: tell("zoom"), scrollBy: () => {},
  });
  for (const [kind, pointerId, clientX] of events) {
    canvas.dispatchEvent(new PointerEvent(`pointer${kind}`, { pointerId, clientX, pointerType: "touch" }));
  }
  return [...told];
}"""


@pytest.mark.long
def test_the_end_of_two_fingers_is_no_press(browser: Browser, web_fleet: WebFleet) -> None:
    down = [("down", 1, 100), ("down", 2, 200)]
    up = [("up", 1, 80), ("up", 2, 220)]
    moves = [("move", number, x) for number, x in ((1, 90), (2, 210), (1, 80), (2, 220))]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(FINGERS, [down[0], up[0]]) == ["press"]
        assert page.evaluate(FINGERS, [*down, *moves, *up]) == ["zoom"]
        assert page.evaluate(FINGERS, [*down, *up]) == []
        again = [("up", 1, 80), ("down", 1, 100), ("up", 1, 100), ("up", 2, 220)]
        assert page.evaluate(FINGERS, [*down, *moves, *again]) == ["zoom"]
        assert page.evaluate(FINGERS, [*down, *up, down[0], up[0]]) == ["press"]


POINTED: Final = """async (points) => {
  const { drawPicture, itemAt } = await import("/static/timeline_picture.js");
  const { HEAD } = await import("/static/timeline_rows.js");
  const { coloursOf } = await import("/static/painter.js");
  const span = (id, gpu, begin_time, end_time) =>
    ({ span_id: id, workload_id: id, gpu_uuid: gpu, state: "LEASED", begin_time, end_time });
  const spans = [
    span("before", "0", 0, 100), span("other", "0", 200, 900),
    span("third", "3", 300, 600), span("after", "7", 800, 1000),
  ];
  const joint = { workload: "before", kind: "parked", from: spans[0], to: spans[3], begin: 100, end: 800 };
  const placed = new Map([["0", 20], ["3", 100], ["7", 200]]);
  const time = { start: 0, end: 1000, scale: () => ({ labels: 0, xOf: (one) => one }) };
  const canvas = document.createElement("canvas");
  const hits = drawPicture(canvas, { width: 1000, height: 400, scrollTop: 0 }, {
    time, layout: { rows: [], spans, joints: [joint], placed }, colours: coloursOf(document.body),
    chosen: null, hovered: null, commands: [], events: [], empty: "",
  });
  return points.map(([x, y]) => {
    const item = itemAt(hits, x, y + HEAD);
    return item?.span?.span_id ?? item?.joint?.kind ?? "nothing";
  });
}"""


@pytest.mark.long
def test_a_parked_time_covers_no_bar_of_other_workloads(browser: Browser, web_fleet: WebFleet) -> None:
    """Its line goes below the row, and up or down at its end. Its two strokes are at its begin."""
    points = {
        (50, 20): "before",
        (106, 20): "parked",
        (500, 20): "other",
        (500, 34): "parked",
        (500, 60): "nothing",
        (500, 100): "third",
        (500, 150): "nothing",
        (780, 120): "parked",
        (900, 200): "after",
    }
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(POINTED, list(points)) == list(points.values())


RIGHT_OF_NOW: Final = """async (kind, isRestored) => {
  const { drawPicture } = await import("/static/timeline_picture.js");
  const { coloursOf } = await import("/static/painter.js");
  const { now } = await import("/static/server_time.js");
  const hour = 3600000;
  const present = now();
  const time = {
    start: present - 150 * hour, end: present + 50 * hour,
    scale: () => ({ labels: 0, xOf: (one) => 750 + ((one - present) / hour) * 5 }),
  };
  const span = (id, gpu) => ({ span_id: id, workload_id: "w", gpu_uuid: gpu });
  const begin = present - hour / 5; // one pixel
  const joint = { workload: "w", kind, from: span("a", "0"), to: span("b", "7"), begin, end: begin + 1000 };
  if (!isRestored) Object.assign(joint, { to: null, end: Infinity });
  const placed = new Map([["0", 20], ["7", 200]]);
  const canvas = document.createElement("canvas");
  const painted = (joints, x, width) => {
    drawPicture(canvas, { width: 1000, height: 400, scrollTop: 0 }, {
      time, layout: { spans: [], joints, placed, rows: [{ y: 20, uuid: "0", slot: 0 }] },
      colours: coloursOf(document.body), chosen: null, hovered: null, commands: [], events: [], empty: "",
    });
    return [...canvas.getContext("2d").getImageData(x, 0, width, 400).data].join();
  };
  const isPainted = (x, width) => painted([joint], x, width) !== painted([], x, width);
  return { left: isPainted(700, 50), right: isPainted(753, 200) };
}"""


@pytest.mark.long
@pytest.mark.parametrize(("kind", "is_restored"), [("parked", False), ("parked", True), ("move", True)])
def test_no_joint_is_right_of_the_present(
    browser: Browser, web_fleet: WebFleet, kind: str, *, is_restored: bool
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        script = f"([kind, isRestored]) => ({RIGHT_OF_NOW})(kind, isRestored)"
        assert page.evaluate(script, [kind, is_restored]) == {"left": True, "right": False}


SLOW_CLOCK: Final = """
const present = Date.now;
Date.now = () => present() - 600000;
"""


@pytest.mark.long
def test_an_addressed_time_is_kept_although_the_clock_of_the_browser_is_slow(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """The address is read before the server's time is known. A time in the future is now."""
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SLOW_CLOCK)
        page.route("**/api/session", lambda route: asked.append(route))
        follow = page.locator("button[aria-pressed]", has_text=re.compile("Follow"))
        for ahead_s, told in ((-30, "Follow now"), (3600, "Following now")):
            asked.clear()
            page.goto(f"{web_fleet.url}timeline?range=60000&end={int(1000 * (time.time() + ahead_s))}")
            expect(follow).to_have_text("Follow now")
            next_request(page, asked).continue_()
            expect(page.locator("#who")).to_contain_text("admin")
            expect(follow).to_have_text(told)
            expect(page).to_have_url(re.compile("&end=" if told == "Follow now" else r"range=60000$"))
