"""The timeline in a real browser: what it learns after its first answer."""

import re
import signal
import time
from typing import Any, Final
from urllib.parse import parse_qs

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page
from .conftest import WebFleet
from .http import Client

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
        route.fulfill(json={"spans": answers.pop(0), "is_truncated": False, "time": 50_000})

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
        route.fulfill(json={"spans": spans, "is_truncated": is_truncated, "time": 50_000})

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
            route.fulfill(json={"spans": [], "is_truncated": False, "time": 50_000})

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
        answer = {"spans": [late], "is_truncated": is_truncated, "time": 1_000 * time.time()}
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
        route.fulfill(json={"spans": spans, "is_truncated": False, "time": 50_000})

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
        route.fulfill(json={"spans": [LEASED], "is_truncated": True, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.evaluate(LANE, {"state": state})
        expect(page.locator(".mini canvas")).to_have_attribute("aria-label", re.compile(": 1 stay[.]"))
        expect(page.get_by_text("latest stays only")).to_be_visible()
        assert (page.evaluate("barWidth") > 100) == (state == "EXITED")
    assert asked == ["start=4000&workload=w-1"]


STAYS: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { live } = await import("/static/live.js");
  const { jointsOf } = await import("/static/spans.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const history = new History(() => {});
  const workload = (id, state, begin) =>
    live.workloads.set(id, { workload_id: id, create_time: begin, status: { state } });
  workload("parked", "SUSPENDED", 1000);
  workload("new", "RUNNING", 41000);
  workload("away", "RUNNING", 1000);
  workload("without GPUs", "RUNNING", 1000);
  live.workloads.get("away").status.lease = { gpu_uuids: ["9"] };
  workload("odd id", "SUSPENDED", 0);
  for (const start of [40000, 45000, 20000]) await history.want(start, Infinity);
  return jointsOf([...history.spans.values()], (id) => (id === "parked" ? Infinity : 0)).map(
    (one) => [one.workload, one.kind, one.from.gpu_uuid, one.to ? one.to.gpu_uuid : "now"].join(" "));
}"""


@pytest.mark.long
def test_a_parked_time_that_began_before_the_loaded_time_leads_from_where_the_workload_was(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A workload that began in the loaded time was nowhere before. Each time is asked for once.

    One of them was restored after the loaded time.
    """

    def span(name: str, workload: str, gpu: str, begin: int, end: int | None) -> dict[str, object]:
        ends = {} if end is None else {"end_time": end}
        place = {"gpu_uuid": gpu, "workload_id": workload, "state": "LEASED", "lease_id": name}
        return {"span_id": name, "begin_time": begin, **place, **ends}

    loaded = [span("s-3", "restored", "3", 42_000, None), span("s-5", "new", "5", 41_000, None)]
    stays = [span("s-1", "parked", "1", 2_000, 8_000), span("s-2", "restored", "2", 3_000, 9_000)]
    stays += [span("s-6", "away", "8", 2_000, 8_000), span("s-7", "away", "9", 60_000, 70_000)]
    asked: list[str] = []

    def tell(route: Route) -> None:
        path = route.request.url.partition("/api/")[2]
        asked.append(path)
        spans = stays if path.startswith("stays") else loaded
        route.fulfill(json={"spans": spans, "is_truncated": False, "time": 50_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.route("**/api/stays?*", tell)
        assert page.evaluate(STAYS) == ["restored parked 2 3", "parked parked 1 now", "away parked 8 9"]
    assert [one for one in asked if one.startswith("stays")] == [
        f"stays?end={time}&workload=parked&workload=away&workload=restored" for time in (40_000, 20_000)
    ]


RESTORED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { live } = await import("/static/live.js");
  const { isParked, jointsOf } = await import("/static/spans.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const history = new History(() => {});
  const workload = (id, status) => live.workloads.set(id, { workload_id: id, create_time: 1000, status });
  workload("before", { state: "SUSPENDED" });
  workload("within", { state: "RUNNING", lease: { lease_id: "s-4" } });
  workload("again", { state: "RUNNING", lease: { lease_id: "s-7" } });
  workload("parked", { state: "SUSPENDED" });
  workload("over", { state: "EXITED", end_time: 200000 });
  workload("ended", { state: "EXITED", end_time: 45000 });
  const joints = () => jointsOf([...history.spans.values()], (id) => isParked(live.workloads.get(id))).map(
    (one) => [one.workload, one.from.gpu_uuid, one.to ? one.to.gpu_uuid : "now"].join(" ")).sort();
  await history.want(40000, 50000);
  const told = [joints()];
  workload("before", { state: "RUNNING", lease: { lease_id: "s-2" } });
  for (let at = 0; at < 2; at += 1) await history.wantNews(40000, 50000);
  told.push(joints());
  await history.want(40000, 56000);
  told.push(joints());
  await history.want(80000, Infinity);
  return [...told, joints()];
}"""


@pytest.mark.long
def test_a_past_time_keeps_the_line_of_a_workload_that_is_restored_later(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """One was parked before the shown time, others within it. No line leads over an unknown time."""

    def span(name: str, workload: str, gpu: str, begin: int, end: int | None) -> dict[str, Any]:
        ends = {} if end is None else {"end_time": end}
        place = {"gpu_uuid": gpu, "workload_id": workload, "state": "LEASED", "lease_id": name}
        return {"span_id": name, "begin_time": begin, **place, **ends}

    stays = {
        "before": [span("s-1", "before", "1", 2_000, 8_000), span("s-2", "before", "2", 60_000, None)],
        "within": [span("s-3", "within", "3", 41_000, 45_000), span("s-4", "within", "4", 70_000, None)],
        "again": [
            span("s-5", "again", "5", 41_000, 43_000),
            span("s-6", "again", "6", 52_000, 55_000),
            span("s-7", "again", "7", 70_000, None),
        ],
        "parked": [span("s-8", "parked", "8", 41_000, 43_000), span("s-9", "parked", "9", 60_000, 65_000)],
        "over": [span("s-10", "over", "10", 41_000, 43_000), span("s-11", "over", "11", 60_000, 65_000)],
        "ended": [span("s-12", "ended", "12", 41_000, 44_000)],
    }
    all_spans = [one for some in stays.values() for one in some]
    asked: list[str] = []

    def tell(route: Route) -> None:
        path = route.request.url.partition("/api/")[2]
        query = parse_qs(path.partition("?")[2])
        spans: list[dict[str, Any]] = []
        if path.startswith("stays"):
            asked.append(path)
            end = int(query["end"][0])
            for name in query["workload"]:
                earlier = [one for one in stays[name] if one["begin_time"] < end]
                later = [one for one in stays[name] if one["begin_time"] >= end]
                is_restored = name != "before" or len(asked) > 2
                spans += earlier[-1:] + later[: int(is_restored)]
        else:
            start, end = int(query["start"][0]), int(query.get("end", ["90000"])[0])
            ends = [(one, one.get("end_time", 90_000)) for one in all_spans]
            spans = [one for one, ended in ends if one["begin_time"] < end and ended > start]
        route.fulfill(json={"spans": spans, "is_truncated": False, "time": 90_000})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/history?*", tell)
        page.route("**/api/stays?*", tell)
        shown = page.evaluate(RESTORED)
    within = ["again 5 6", "over 10 11", "parked 8 9", "parked 9 now", "within 3 4"]
    assert shown == [
        sorted(["before 1 now", *within]),
        sorted(["before 1 2", *within]),
        sorted(["before 1 2", "again 6 7", *within]),
        ["parked 9 now"],
    ]
    after = "stays?end=50000&workload=within&workload=again&workload=parked&workload=over"
    assert asked[1:4] == [after, "stays?end=50000&workload=before", "stays?end=56000&workload=again"]


@pytest.mark.long
def test_the_last_stay_of_a_workload_before_a_time_is_served(fleet: WebFleet) -> None:
    client = Client(fleet.url)
    client.log_in(fleet.token)
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("restore", "train")
    spans = [one for one in client.get("/api/history").json["spans"] if one["state"] == "LEASED"]
    newest, oldest = spans
    workload, before = newest["workload_id"], newest["begin_time"] - 1
    asked = f"/api/stays?end={before}&workload={workload}&workload=unknown"
    assert client.get(asked).json["spans"] == [oldest, newest]
    assert client.get(f"/api/stays?workload={workload}").json["spans"] == [newest]
    assert client.get("/api/stays?" + "&".join(["workload=a"] * 51)).status == 400


REAL_JOINTS: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { jointsOf } = await import("/static/spans.js");
  const history = new History(() => {});
  await history.want(0, Infinity);
  return jointsOf([...history.spans.values()], () => 0, history.commands.values()).map(
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
        assert page.evaluate(REAL_JOINTS) == ["move 0 2", "parked 2 1"]


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
  return jointsOf(stays, () => 0).map((joint) => textOf({ joint })[1]);
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
  const span = (worker_id, end_time) =>
    ({ span_id: worker_id, gpu_uuid: worker_id, worker_id, begin_time: 10, end_time, state: "LEASED" });
  const joint = { workload: "w-1", kind: "parked", to: null };
  const joints = ["here", "silent"].map((one) => ({ ...joint, from: span(one, 100) }));
  const commands = ["PENDING"].map((state) => ({ state, create_time: 100, operation: { stop: {} } }));
  const layout = { rows: [], spans: [], joints, placed: new Map([["here", 20], ["silent", 60]]) };
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
        assert present[:4] == [None, 300, 900, 300]
        assert present[4] > 900
        for contact in ({"isConnected": False}, {"lost": {"since": 1}}, {"refused": {"message": ""}}):
            assert page.evaluate(STALE, contact) == [400, 300, 400, 300, 400]
        assert page.evaluate(STALE, {"isConnected": False, "seenAt": 0})[:2] == [None, 300]


PARKED: Final = """async () => {
  const { History } = await import("/static/history.js");
  const { live } = await import("/static/live.js");
  const { layOut } = await import("/static/timeline_rows.js");
  const { textOf } = await import("/static/timeline_words.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const history = new History(() => {});
  const workload = (id, state, status = {}) => {
    live.workloads.set(id, { workload_id: id, status: { state, ...status } });
    live.gpus.set(id, { uuid: id, worker_id: "worker-a" });
    const place = { gpu_uuid: id, workload_id: id, worker_name: "alpha", state: "LEASED" };
    history.spans.set(id, { span_id: id, begin_time: 1000, end_time: 5000, ...place });
  };
  for (const state of ["SUSPENDED", "RESTORING", "STOPPING", "RUNNING", "EXITED"]) workload(state, state);
  workload("stopping from park", "STOPPING", { park_time: 4000 });
  workload("over", "EXITED", { end_time: 60000 });
  const joints = layOut(history, { start: 70000, end: 90000 }, []).joints;
  return joints.map((joint) => `${joint.workload} ${textOf({ joint })[1].split(" ")[0]}`);
}"""


@pytest.mark.long
def test_a_workload_is_parked_during_its_restore_or_stop_too(browser: Browser, fleet: WebFleet) -> None:
    """A stopped workload that ran was never parked, and the clock of its end is that of its host."""
    with open_page(browser, fleet.url, fleet.token) as page:
        parked = ("SUSPENDED", "RESTORING", "stopping from park")
        assert page.evaluate(PARKED) == [f"{state} since" for state in parked]


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
  const joint = { workload: "before", kind: "parked", from: spans[0], to: spans[3] };
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
