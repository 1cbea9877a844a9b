"""The page with a keyboard, on a phone, and as axe sees it."""

import json
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, expect

from .browsers import SCRIPTED_STREAM, Complaints, expect_state, open_page, slot
from .conftest import WebFleet

AXE: Final = Path(__file__).resolve().parents[2] / ".cache/axe/node_modules/axe-core/axe.min.js"


PHONE: Final = {"width": 390, "height": 844}


LONG: Final = "the-workload-with-a-rather-long-name-of-fifty-letters"


VIEWS: Final = ("/", "/timeline", "/workloads", "/commands")


@pytest.mark.long
def test_the_keyboard_alone_suffices(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token, reduced_motion="reduce") as page:
        expect_state(page, 0, "LEASED")
        page.keyboard.press("/")
        expect(page.locator("input[type=search]")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator(".host-name a")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.locator(slot(page, 0))).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(page.locator(slot(page, 1))).to_be_focused()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        expect(page.locator(".drawer")).to_be_focused()
        expect(page.locator(slot(page, 0))).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("Escape")
        expect(page.locator(slot(page, 0))).to_be_focused()
        expect(page.locator(slot(page, 0))).to_have_attribute("aria-expanded", "false")
        page.keyboard.press("Enter")
        suspend = page.locator('.drawer button:text-is("Suspend")')
        suspend.focus()
        page.keyboard.press("Enter")
        expect(page.locator('dialog button:text-is("Suspend")')).to_be_focused()
        page.keyboard.press("Enter")
        expect(page.locator("dialog .badge")).to_have_text("succeeded")
        expect(page.locator('dialog button:text-is("Close")')).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Escape")
        expect(page.locator(".drawer")).to_have_count(0)
        expect_state(page, 0, "FREE")


@pytest.mark.long
def test_keys_move_the_focus_over_the_tiles_of_hosts(browser: Browser, web_fleet: WebFleet) -> None:
    """The hosts beta and delta have no tiles."""
    changes: list[list[object]] = []
    for name, gpus in (("alpha", 3), ("beta", 0), ("gamma", 2), ("delta", 0)):
        changes.append(["worker", name, {"worker_id": name, "name": name, "state": "CONNECTED"}])
        for number in range(gpus):
            uuid = f"GPU-{name}-{number}"
            changes.append(["gpu", uuid, {"uuid": uuid, "worker_id": name, "slot": number, "state": "FREE"}])
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        page.locator('[data-uuid="GPU-alpha-1"]').focus()
        for key, goal in (
            ("End", "gamma-1"),
            ("End", "gamma-1"),
            ("ArrowRight", "gamma-1"),
            ("Home", "alpha-0"),
            ("Home", "alpha-0"),
            ("ArrowLeft", "alpha-0"),
            ("ArrowRight", "alpha-1"),
            ("ArrowRight", "alpha-2"),
            ("ArrowRight", "gamma-0"),
            ("ArrowLeft", "alpha-2"),
            ("ArrowDown", "gamma-1"),
            ("ArrowUp", "alpha-1"),
            ("PageDown", "gamma-1"),
            ("PageUp", "alpha-1"),
        ):
            page.keyboard.press(key)
            expect(page.locator(f'[data-uuid="GPU-{goal}"]')).to_be_focused()


@pytest.mark.long
def test_the_focus_outlives_a_change(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        expect_state(page, 3, "FREE")
        host = page.locator(".host-name a")
        host.focus()
        fleet.fleet.cli("cordon", "alpha/3", "--reason", "a fan")
        expect_state(page, 3, "CORDONED")
        expect(host).to_be_focused()
        page.click('nav a:text-is("Workloads")')
        workload = page.locator("tbody a").first
        workload.focus()
        page.evaluate("document.querySelector('tbody tr').dataset.former = ''")
        fleet.fleet.cli("uncordon", "alpha/3")
        expect(page.locator("tbody tr").first).not_to_have_attribute("data-former", "")
        expect(workload).to_be_focused()
        page.click('nav a:text-is("Fleet")')
        page.click(slot(page, 3))
        page.locator('.drawer button:text-is("Cordon…")').focus()
        fleet.fleet.cli("cordon", "alpha/3", "--reason", "a fan")
        expect(page.locator(".drawer .close")).to_be_focused()  # the button has gone


@pytest.mark.long
@pytest.mark.skipif(not AXE.exists(), reason="run `make axe` first")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [{"width": 1280, "height": 800}, PHONE], ids=["desk", "phone"])
def test_axe_has_no_finding(browser: Browser, fleet: WebFleet, scheme: str, size: dict[str, int]) -> None:
    fleet.fleet.run_counter("parked")
    fleet.fleet.cli("suspend", "parked")
    fleet.fleet.cli("cordon", "alpha/3", "--reason", "a fan")
    workload = fleet.fleet.client.workload("train").workload_id
    worker = fleet.fleet.client.workload("train").worker_id
    complaints = Complaints()  # the policy of the page refuses a part of axe-core's own work
    with open_page(browser, fleet.url, fleet.token, complaints, color_scheme=scheme, viewport=size) as page:
        for path in (*VIEWS, f"/workloads/{workload}", f"/workers/{worker}", "/plain/fleet"):
            page.goto(fleet.url.rstrip("/") + path)
            expect(page.locator("h1")).to_be_visible()
            page.wait_for_load_state("load")
            require_accessible(page, path)
        page.goto(fleet.url)
        page.click(slot(page, 0))
        expect(page.locator(".drawer")).to_contain_text("train")
        require_accessible(page, "the drawer")
        page.click('.drawer button:text-is("Suspend")')
        expect(page.locator("dialog .plan")).to_be_visible()
        require_accessible(page, "the dialog")
    with open_page(browser, fleet.url, fleet.token, complaints, color_scheme=scheme) as page:
        page.click('button:text-is("Log out")')
        expect(page.locator("#token")).to_be_visible()
        require_accessible(page, "the login")


def require_accessible(page: Page, what: str) -> None:
    """Runs axe-core on the page. The policy of the page permits no script of others, except to the test."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    told = [
        (one["id"], [node["target"] for node in one["nodes"]], one["nodes"][0]["failureSummary"])
        for one in found["violations"]
    ]
    assert not told, (what, json.dumps(told, indent=1))


@pytest.mark.long
def test_a_phone_shows_all_views_without_a_horizontal_scrollbar(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.run_counter(LONG)
    with open_page(browser, fleet.url, fleet.token, viewport=PHONE) as page:
        for path in VIEWS:
            page.goto(fleet.url.rstrip("/") + path)
            expect(page.locator("h1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.goto(f"{fleet.url}workloads")
        expect(page.locator("tbody")).to_contain_text(LONG)
        table = page.locator(".scroll")
        assert table.evaluate("one => one.scrollWidth - one.clientWidth") <= 0
        page.goto(f"{fleet.url}timeline")
        page.click('button:text-is("Table")')
        expect(page.locator("tbody")).to_contain_text(LONG)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.long
def test_changes_keep_the_places_of_lists_and_details(browser: Browser, web_fleet: WebFleet) -> None:
    def event(number: int, workload: str) -> dict[str, object]:
        return {"event_id": f"e-{number:03}", "workload_id": workload, "message": f"note {number}", "time": 1}

    row = {"workload_id": "w-1", "name": "one", "status": {"state": "EXITED"}}
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    answer = {"workload": row, "commands": [], "events": [event(number, "w-1") for number in range(80)]}
    viewer = {"identity": "user/ann", "role": "VIEWER"}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def tell(*changes: list[object]) -> None:
            page.evaluate("tell", {"changes": changes, "state": {}})

        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.route("**/api/session", lambda route: route.fulfill(json=viewer))  # who has no output
        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}workloads/w-1")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        events = page.locator(".events")
        expect(events.locator("li")).to_have_count(80)
        tell(["event", "e-102", event(102, "w-1")])  # the view is complete
        expect(events.locator("li")).to_have_count(81)
        events.evaluate("one => { one.scrollTop = 200; one.dataset.former = ''; }")
        tell(["event", "e-100", event(100, "w-2")], ["command", "c-2", {**command, "workload_id": "w-2"}])
        tell(["command", "c-1", {**command, "state": "RUNNING"}])
        expect(page.get_by_label("Commands")).to_contain_text("running")
        assert page.locator(".events[data-former]").count() == 1
        tell(["event", "e-101", event(101, "w-1")])
        expect(events).to_contain_text("note 101")
        assert events.evaluate("one => one.scrollTop") == 200

        page.route("**/api/commands/c-1", lambda route: route.fulfill(json=command))
        page.goto(f"{web_fleet.url}commands/c-1")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.click("summary")
        tell(["command", "c-1", {**command, "state": "RUNNING"}])
        expect(page.locator(".command .badge")).to_have_text("running")
        expect(page.locator("details[open] .output")).to_be_visible()
