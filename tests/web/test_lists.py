"""The bounds of lists in a real browser."""

import re
from functools import partial
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page
from .conftest import WebFleet

TABLE: Final = """async (number) => {
  const { tableOf } = await import("/static/timeline_table.js");
  const spans = Array.from({ length: number }, (_, at) => ({
    span_id: String(at), gpu_uuid: "GPU-1", state: "CORDONED", begin_time: at, end_time: at + 1,
  }));
  const [told, table] = tableOf({ spans, placed: new Map([["GPU-1", 4]]) }, { start: 0, end: 1e6 });
  return [told.textContent, table.querySelectorAll("tbody tr").length];
}"""


@pytest.mark.long
def test_a_list_tells_its_bound_and_what_is_not_loaded(browser: Browser, web_fleet: WebFleet) -> None:
    stop = {"operation": {"stop": {}}, "state": "SUCCEEDED", "create_time": 1, "end_time": 2}
    commands = [{**stop, "command_id": f"c-{number}"} for number in range(500)]
    ended = {"name": "one", "create_time": 1, "status": {"state": "EXITED"}}
    workloads = [{**ended, "workload_id": f"w-{number}"} for number in range(1_000)]

    def tell(answer: dict[str, object], route: Route) -> None:
        route.fulfill(json=answer)

    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        for kind, entries, told, none in (
            ("commands", commands, "The latest 500 are shown.", "No past command matches"),
            ("workloads", workloads, "1,000 workloads are shown", "No workload matches"),
        ):
            answer: dict[str, object] = {kind: entries, "next_page_token": "more"}
            page.route(f"**/api/{kind}?*", partial(tell, answer))
            page.goto(web_fleet.url + kind)
            more = page.get_by_role("button", name="Show older ones")
            expect(page.locator("main")).to_contain_text(told)
            expect(more).to_have_count(0)
            page.fill("input[type=search]", "other")
            expect(page.locator("main")).to_contain_text(f"{none} among the loaded ones: show older ones.")
            expect(page.locator("main")).not_to_contain_text(told)
            answer |= {kind: [], "next_page_token": ""}
            more.click()
            expect(page.locator("main")).to_contain_text(f"{none}.")
            page.fill("input[type=search]", "")
            expect(more).to_have_count(0)
            expect(page.locator("main")).not_to_contain_text(told)  # all are


@pytest.mark.long
@pytest.mark.parametrize("kind", ["workloads", "commands"])
def test_a_list_tells_that_it_loads(browser: Browser, web_fleet: WebFleet, kind: str) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route(f"**/api/{kind}?*", lambda route: asked.append(route))
        page.goto(web_fleet.url + kind)
        main = page.locator("main")
        expect(main).to_contain_text("Loading")
        next_request(page, asked).continue_()
        expect(main).not_to_contain_text("Loading")
        expect(page.locator(".counts b")).to_have_text("0")


WATCHED: Final = """() => {
  window.changes = 0;
  const watcher = new MutationObserver((all) => (changes += all.length));
  for (const one of document.querySelectorAll('[role="status"]')) {
    watcher.observe(one, { childList: true, characterData: true, subtree: true });
  }
}"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["workload", "command"])
def test_a_screen_reader_hears_what_matches_and_no_equal_count(
    browser: Browser, web_fleet: WebFleet, kind: str
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(time: int) -> None:
            row = {
                "create_time": time,
                "workload_id": "w-1",
                "command_id": "c-1",
                "worker_id": f"host-{time}",
            }
            row |= {"workload": {"name": "one", "status": {"state": "RUNNING"}}, "command": {}}[kind]
            page.evaluate("tell", {"changes": [[kind, f"{kind[0]}-1", row]], "state": {}})

        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}{kind}s")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        tell(1)
        shown = page.locator(".page")
        expect(shown).to_contain_text("one" if kind == "workload" else "operation")
        page.wait_for_timeout(300)
        page.evaluate(WATCHED)
        former = page.locator(".page [data-former]")
        part = ".page tbody tr" if kind == "workload" else ".page .command"
        page.evaluate("(part) => { document.querySelector(part).dataset.former = ''; }", part)
        tell(2)
        expect(former).to_have_count(0)
        assert page.evaluate("changes") == 0
        page.fill("input[type=search]", "none")
        expect(page.locator("#announcer")).to_have_text(f"Matching {kind}s: 0.")


@pytest.mark.long
def test_a_failed_hook_is_marked_and_found(browser: Browser, web_fleet: WebFleet) -> None:
    status = {"state": "RUNNING", "error": {"reason": "HOOK_FAILED"}, "lease": {"gpu_uuids": ["GPU-1"]}}
    row = {"workload_id": "w-1", "name": "one", "worker_id": "worker-a", "create_time": 1, "status": status}
    gpu = {"uuid": "GPU-1", "worker_id": "worker-a", "slot": 0, "state": "LEASED", "workload_id": "w-1"}
    worker = {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}
    changes = [["worker", "worker-a", worker], ["gpu", "GPU-1", gpu], ["workload", "w-1", row]]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        for path, found in (("", ".host"), ("workloads", ".page tbody tr")):
            page.goto(f"{web_fleet.url}{path}")
            page.wait_for_function("() => Boolean(window.source?.onmessage)")
            page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
            expect(page.locator(found)).to_contain_text("hook failed")
            page.fill("input[type=search]", "hook failed")
            expect(page.locator("#announcer")).to_have_text(re.compile("Matching (hosts|workloads): 1"))
            expect(page.locator(found)).to_contain_text("hook failed")


@pytest.mark.long
def test_each_error_of_a_running_workload_has_a_mark_and_a_text(
    browser: Browser, web_fleet: WebFleet
) -> None:
    changes: list[list[object]] = [["worker", "a", {"worker_id": "a", "name": "alpha", "state": "CONNECTED"}]]
    for slot, reason in enumerate(("HOOK_FAILED", "UNKNOWN_GPU", "A_LATER_REASON")):
        gpu = {"uuid": f"GPU-{slot}", "worker_id": "a", "slot": slot, "state": "LEASED"}
        gpu |= {"workload_id": f"w-{slot}", "workload_name": f"w{slot}"}
        status = {"state": "RUNNING", "error": {"reason": reason}, "lease": {"gpu_uuids": [f"GPU-{slot}"]}}
        row = {"workload_id": f"w-{slot}", "name": f"w{slot}", "worker_id": "a", "status": status}
        changes += [["gpu", f"GPU-{slot}", gpu], ["workload", f"w-{slot}", row]]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        for slot, text in enumerate(("hook failed", "lost a GPU", "a later reason")):
            tile = page.locator(f'[data-uuid="GPU-{slot}"]')
            expect(tile.locator(".figures")).to_contain_text(text)
            expect(tile).to_have_attribute("aria-label", re.compile(f"workload w{slot} running, {text}"))
            mark = tile.locator(".title svg").nth(1)
            unhealthy = "() => import('/static/glyphs.js').then(({ glyph }) => glyph('UNHEALTHY').innerHTML)"
            assert mark.inner_html() == page.evaluate(unhealthy)
            bad = page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bad')")
            colours = mark.evaluate(
                "(one, bad) => { const probe = document.createElement('i'); probe.style.color = bad;"
                "document.body.append(probe); const wanted = getComputedStyle(probe).color; probe.remove();"
                "return [getComputedStyle(one).color, wanted]; }",
                bad,
            )
            assert colours[0] == colours[1]
            page.click(f'[data-uuid="GPU-{slot}"]')
            expect(page.locator(".drawer")).to_contain_text(f"Staterunning, {text}")


@pytest.mark.long
def test_while_the_view_loads_no_id_stands_in_the_place_of_a_name(
    browser: Browser, web_fleet: WebFleet
) -> None:
    parked = {"state": "SUSPENDED", "parked_bytes": 576 * 2**20, "park_time": 1}
    runs = {"state": "RUNNING", "lease": {"gpu_uuids": ["GPU-1"]}}
    states = (("one", parked), ("two", {"state": "PENDING"}), ("three", runs))
    common = {"worker_id": "worker-a", "create_time": 1}
    rows = [
        {**common, "workload_id": f"w-{at:012}", "name": name, "status": status}
        for at, (name, status) in enumerate(states)
    ]
    stored = {"create_time": 1, "end_time": 2, "state": "UNKNOWN", "worker_id": "worker-a"}
    commands = [
        {**stored, "command_id": "c-1", "operation": {"cordon": {"gpu_uuids": ["GPU-1"]}}},
        {**stored, "command_id": "c-2", "operation": {"suspend": {}}, "workload_id": "w-000000000000"},
    ]
    worker = {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}
    gpu = {"uuid": "GPU-1", "worker_id": "worker-a", "slot": 0, "state": "LEASED"}
    changes = [["worker", "worker-a", worker], ["gpu", "GPU-1", gpu], ["workload", "w-000000000000", rows[0]]]
    id_of = re.compile("worker-a|w-0|GPU-1|deleted")
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.route("**/api/workloads?*", lambda one: one.fulfill(json={"workloads": rows}))
        page.route("**/api/commands?*", lambda one: one.fulfill(json={"commands": commands}))
        page.route("**/api/names?*", lambda one: one.fulfill(json={}))
        page.route("**/api/history?*", lambda one: one.fulfill(json={"spans": []}))
        host = {"worker": worker, "gpus": [], "events": []}
        page.route("**/api/workers/*", lambda one: one.fulfill(json=host))
        main = page.locator("main")

        def load(path: str, shown: str) -> None:
            page.goto(f"{web_fleet.url}{path}")
            page.wait_for_function("() => Boolean(window.source?.onmessage)")
            page.evaluate("tell", {"reset": {}, "changes": [], "state": {"is_loading": True}})
            expect(main).to_contain_text(shown)
            assert not id_of.search(main.inner_text()), main.inner_text()

        def complete() -> None:
            page.evaluate("tell", {"changes": changes, "state": {}})

        load("workloads", "…: 576 MiB in host memory")
        places = page.locator("tbody td:nth-child(3)")
        expect(places).to_have_text(["…: 576 MiB in host memory", "…", "1 GPU"])
        for word in ("worker-a", "alpha"):
            page.fill("input[type=search]", word)
            expect(main).to_contain_text("No workload matches yet.")
        complete()
        expect(page.locator("tbody tr")).to_have_count(3)
        page.fill("input[type=search]", "")
        expect(places).to_have_text(["alpha: 576 MiB in host memory", "alpha", "alpha/0"])

        load("commands", "Its host … is out of contact")
        expect(page.locator(".command header a[href^='/w']")).to_have_text(["…", "…"])
        complete()
        expect(page.locator(".command header a[href^='/w']")).to_have_text(["alpha/0", "one"])
        expect(main).to_contain_text("Its host alpha is out of contact")

        page.goto(f"{web_fleet.url}workers/alpha")
        card = page.get_by_role("region", name="Workloads")
        expect(card).to_contain_text("Loading…")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        expect(card).to_contain_text("one")

        uuid = "GPU-00000000-0000-0000-0000-000000000000"
        changes.append(["gpu", uuid, {**gpu, "uuid": uuid, "slot": 1}])
        event = {"event_id": "e-1", "workload_id": "w-2", "message": f"lost {uuid}", "time": 1}
        of = {"workload": {**rows[2], "workload_id": "w-2"}, "commands": commands[:1], "events": [event]}
        page.route("**/api/workloads/w-2", lambda one: one.fulfill(json=of))
        page.route("**/api/workloads/w-2/*", lambda one: one.fulfill(json={"refusal": {"message": "none"}}))
        viewer = {"identity": "user/ann", "role": "VIEWER"}  # who has no output
        page.route("**/api/session", lambda one: one.fulfill(json=viewer))
        page.goto(f"{web_fleet.url}workloads/w-2")
        facts = page.locator(".facts").first
        expect(facts).to_contain_text("GPUs…Host…")
        expect(page.locator(".command header a")).to_have_text("…")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        expect(facts).to_contain_text("GPUsalpha/0Hostalpha")
        expect(page.locator(".command header a")).to_have_text("alpha/0")
        expect(page.locator(".events li")).to_contain_text("lost alpha/1")


@pytest.mark.long
def test_a_window_without_a_live_view_does_not_wait_for_it(browser: Browser, web_fleet: WebFleet) -> None:
    host = {"worker": {"worker_id": "worker-a", "name": "alpha"}, "gpus": [], "events": []}
    full = {"identity": "local/ann", "role": "ADMIN", "full": "too many streams are open"}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/live", lambda route: route.fulfill(status=503))
        page.route("**/api/session", lambda route: route.fulfill(json=full))
        page.route("**/api/workers/*", lambda route: route.fulfill(json=host))
        for path, told in (
            ("workloads", ["No workload matches."]),
            ("commands", ["No such command is under way.", "No past command matches."]),
        ):
            page.goto(f"{web_fleet.url}{path}")
            page.fill("input[type=search]", "none")
            for one in told:
                expect(page.get_by_text(one, exact=True)).to_be_visible()
        page.goto(f"{web_fleet.url}workers/alpha")
        expect(page.get_by_role("region", name="Workloads")).to_contain_text("The workloads are not shown.")


@pytest.mark.long
def test_a_skip_to_the_content_keeps_the_view(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.goto(f"{web_fleet.url}workloads")
        page.fill("input[type=search]", "one")
        page.locator(".skip").focus()
        page.keyboard.press("Enter")
        expect(page.locator("main")).to_be_focused()
        page.wait_for_timeout(300)
        assert page.input_value("input[type=search]") == "one"
        page.keyboard.press("Tab")
        expect(page.locator("input[type=search]")).to_be_focused()


@pytest.mark.long
def test_the_table_of_a_timeline_tells_the_number_of_its_spans(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        told, rows = page.evaluate(TABLE, 1_500)
        assert re.fullmatch("1,500 spans from .*, of which the latest 1,000 are shown[.]", told)
        assert rows == 1_000
        told, rows = page.evaluate(TABLE, 2)
        assert re.fullmatch("2 spans from .*, the latest first[.]", told)
        assert rows == 2


@pytest.mark.long
def test_the_focus_stays_on_its_command(browser: Browser, web_fleet: WebFleet) -> None:
    """Each command has the same buttons, and maybe a link to the same workload."""
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(number: int) -> None:
            command = {"command_id": f"c-{number}", "workload_id": "w-1", "create_time": number}
            row = {**command, "operation": {"suspend": {}}, "state": "RUNNING"}
            page.evaluate("tell", {"changes": [["command", f"c-{number}", row]], "state": {}})

        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}commands")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        rows = page.locator('[aria-label="Under way"] .command')
        tell(1)
        tell(2)
        for at, part in enumerate(("button", 'a[href="/workloads/w-1"]')):
            expect(rows).to_have_count(2 + at)
            rows.last.locator(part).focus()
            tell(3 + at)  # the latest is on top
            expect(rows).to_have_count(3 + at)
            expect(rows.last.locator(part)).to_be_focused()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["workload", "command"])
def test_a_list_whose_first_load_failed_is_asked_for_again(
    browser: Browser, web_fleet: WebFleet, kind: str
) -> None:
    late = "the coordinator did not answer in time"
    entry = {"workload_id": "w-1", "command_id": "c-1", "name": "one", "create_time": 1}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.route(f"**/api/{kind}s?*", lambda route: asked.append(route))
        page.goto(f"{web_fleet.url}{kind}s")
        problem = page.locator(".page .box.bad")
        again = page.get_by_role("button", name="Try again")
        next_request(page, asked).fulfill(status=504, json={"message": late})
        expect(problem).to_have_text(f"{late}. The page tries again by itself.")
        expect(again).to_be_enabled()
        next_request(page, asked).fulfill(status=403, json={"message": "no role"})
        expect(problem).to_have_text("no role")
        again.click()
        next_request(page, asked).fulfill(json={f"{kind}s": [entry], "next_page_token": ""})
        expect(problem).to_be_hidden()
        expect(again).to_have_count(0)
        expect(page.locator(".page")).to_contain_text("one" if kind == "workload" else "operation")
