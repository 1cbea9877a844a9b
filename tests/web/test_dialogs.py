"""The dialogs of actions: refusals, long names, the focus, and their sentences."""

import json
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page, slot
from .conftest import WebFleet
from .dialog_scripts import BESIDE, CANCEL, DRAIN, SUSPEND

LATE = "no answer from the server in time: if many windows of this page are open, close some"


DEADLINE = """AbortSignal.timeout = () => {
  const aborted = new AbortController();
  window.passDeadline = () => aborted.abort(new DOMException("", "TimeoutError"));
  return aborted.signal;
}"""


@pytest.mark.long
def test_a_refused_or_unanswered_action_can_be_repeated(browser: Browser, fleet: WebFleet) -> None:
    complaints = Complaints()  # a browser complains of a refusal
    with open_page(browser, fleet.url, fleet.token, complaints) as page:
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Cordon…")')
        page.fill("dialog #reason", "   ")
        reason = page.locator("dialog #reason:invalid")
        expect(reason).to_have_count(1)
        reason.evaluate("one => one.removeAttribute('pattern')")  # the server refuses blanks, too
        page.click('dialog button:text-is("Cordon")')
        expect(page.locator("dialog .box.bad")).to_be_visible()
        expect(page.locator('dialog button:text-is("Cordon")')).to_be_disabled()
        page.fill("dialog #reason", "a fan")
        page.evaluate(DEADLINE)
        page.route("**/api/action", lambda route: None)  # no answer
        page.click('dialog button:text-is("Cordon")')
        expect(page.locator("dialog footer")).to_have_text("Sending…CloseCordon")
        page.evaluate("passDeadline()")
        expect(page.locator("dialog .box.bad")).to_have_text(
            f"{LATE}. The command may have been stored: see Commands. "
            "“Cordon” again is safe: it is not carried out twice."
        )
        page.click('dialog button:text-is("Cordon")')
        page.click('dialog button:text-is("Close")')
        expect(page.locator(".notice")).to_contain_text(
            "Cordon alpha/3: the dialog was closed before the answer. The command may have been stored"
        )
        page.evaluate("passDeadline()")
        expect(page.locator(".notice")).to_contain_text("no answer from the server in time")
        page.click('[aria-label="Close the notice"]')
        page.unroute("**/api/action")
        page.click('.drawer button:text-is("Cordon…")')
        page.fill("dialog #reason", "a fan")
        page.click('dialog button:text-is("Cordon")')
        expect(page.locator("dialog .command .badge")).to_have_text("succeeded")
    assert [line for line in complaints.lines if "Failed to load resource" not in line] == []


@pytest.mark.long
def test_a_changed_form_is_a_new_request(browser: Browser, fleet: WebFleet) -> None:
    ids: list[str] = []
    with open_page(browser, fleet.url, fleet.token, Complaints()) as page:
        page.route("**/api/action", lambda route: route.abort())
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Cordon…")')
        told = page.locator("dialog .box.bad")
        for reason in ("a fan", "", "a cable"):
            if reason:
                page.fill("dialog #reason", reason)
            if reason == "a cable":
                expect(told).to_contain_text("The changed command is a new one")
                expect(told).not_to_contain_text("again is safe")
            with page.expect_request("**/api/action") as asked:
                page.click('dialog button:text-is("Cordon"):enabled')
            ids.append(json.loads(asked.value.post_data or "")["request_id"])
            expect(told).to_contain_text("“Cordon” again is safe")
        assert ids[0] == ids[1] != ids[2]
        page.unroute("**/api/action")
        unknown = {"reason": "STORAGE_UNAVAILABLE", "message": "repeat the request"}
        page.route("**/api/action", lambda route: route.fulfill(status=503, json=unknown))
        page.click('dialog button:text-is("Cordon"):enabled')
        expect(told).to_have_text("repeat the request")
        page.unroute("**/api/action")
        page.click('dialog button:text-is("Cordon"):enabled')
        expect(page.locator("dialog .command .badge")).to_have_text("succeeded")


@pytest.mark.long
def test_a_refusal_of_the_api_is_certain_whatever_its_status(browser: Browser, fleet: WebFleet) -> None:
    silent = {"reason": "WORKER_UNAVAILABLE", "message": "alpha is not in contact: try again later"}
    with open_page(browser, fleet.url, fleet.token, Complaints()) as page:
        page.route("**/api/action", lambda route: route.fulfill(status=503, json=silent))
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Cordon…")')
        page.fill("dialog #reason", "a fan")
        page.click('dialog button:text-is("Cordon")')
        expect(page.locator("dialog .box.bad")).to_have_text("alpha is not in contact: try again later")


@pytest.mark.long
@pytest.mark.parametrize("width", [360, 1280])
def test_a_long_name_is_not_cut(browser: Browser, fleet: WebFleet, width: int) -> None:
    name = 63 * "n"
    fleet.fleet.run_counter(name)
    with open_page(browser, fleet.url, fleet.token, viewport={"width": width, "height": 800}) as page:

        def fits(selector: str) -> bool:
            return bool(page.locator(selector).evaluate("one => one.scrollWidth <= one.clientWidth"))

        page.click(slot(page, 1))
        expect(page.locator(".drawer h3")).to_contain_text(name)
        assert fits(".drawer")
        page.click('.drawer button:text-is("Stop…")')
        expect(page.locator("dialog h2")).to_contain_text(name)
        assert fits("dialog header")
        assert fits("dialog .body")
        page.keyboard.press("Escape")
        page.click('.drawer button:text-is("Move…")')
        page.click(f"{slot(page, 3)}.candidate")
        expect(page.locator("dialog h2")).to_contain_text(name)
        assert fits("dialog .body")
        page.goto(f"{fleet.url}commands")
        expect(page.locator('[aria-label="Past"]')).to_contain_text(name)
        assert fits(".page")
        page.click("text=Details")
        expect(page.locator(".command")).to_contain_text(name)
        assert fits(".page")
        page.click(".command a")
        expect(page.locator("h1")).to_contain_text(name)
        assert fits(".page")


@pytest.mark.long
def test_the_focus_returns_to_where_a_dialog_was_opened(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 0))
        stop = page.locator('.drawer button:text-is("Stop…")')
        stop.click()
        page.keyboard.press("Escape")
        expect(stop).to_be_focused()
        stop.click()
        expect(page.locator("dialog")).to_be_visible()
        fleet.fleet.cli("cordon", "alpha/0", "--reason", "a fan")  # the drawer is drawn anew
        expect(page.locator('.drawer button:text-is("Uncordon")')).to_have_count(1)
        page.keyboard.press("Escape")
        expect(stop).to_be_focused()
        page.click('.drawer button:text-is("Uncordon")')
        page.click('dialog button:text-is("Uncordon")')
        expect(page.locator("dialog .badge")).to_have_text("succeeded")
        page.click('dialog button:text-is("Close")')
        expect(page.locator(".drawer .close")).to_be_focused()  # there is no such button any more
        page.click('.drawer button:text-is("Move…")')
        page.click(f"{slot(page, 2)}.candidate")
        page.click('dialog button:text-is("Move"):enabled')
        expect(page.locator("dialog .badge")).to_have_text("succeeded")
        expect(page.locator(slot(page, 2))).to_have_attribute("data-state", "LEASED")
        page.click('dialog button:text-is("Close")')
        expect(page.locator(slot(page, 2))).to_be_focused()
        page.goto(f"{fleet.url}workloads/train")
        page.click('button:text-is("Suspend")')
        page.click('dialog button:text-is("Suspend"):enabled')
        expect(page.locator("dialog .badge")).to_have_text("succeeded")
        expect(page.locator('button:text-is("Restore")')).to_be_attached()
        page.click('dialog button:text-is("Close")')
        expect(page.locator("#main")).to_be_focused()


@pytest.mark.long
def test_a_sentence_agrees_with_its_number(browser: Browser, fleet: WebFleet) -> None:
    worker = fleet.fleet.client.workload("train").worker_id
    with open_page(browser, fleet.url, fleet.token) as page:

        def expect_sentences(name: str, stop: str, drain: str) -> None:
            page.goto(f"{fleet.url}workloads/{name}")
            page.click('button:text-is("Stop…")')
            expect(page.locator("dialog .steps")).to_contain_text(stop)
            page.goto(f"{fleet.url}workers/{worker}")
            expect(page.locator('[aria-label="Workloads"]')).to_contain_text(name)
            page.click('button:text-is("Drain…")')
            expect(page.locator("dialog .steps").first).to_contain_text(drain)

        expect_sentences("train", "1 GPU becomes free: alpha/0.", "1 workload with GPUs is suspended")
        fleet.fleet.run_counter("two", gpus=2)
        expect_sentences(
            "two", "2 GPUs become free: alpha/1, alpha/2.", "2 workloads with GPUs are suspended"
        )


@pytest.mark.long
def test_a_restore_shows_the_gpus_of_its_plan(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("cordon", "alpha/0", "--reason", "a fan")
    asked: list[Route] = []
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}workloads/train")
        page.route("**/api/plan", lambda route: asked.append(route))
        with page.expect_request("**/api/plan"):
            page.click('button:text-is("Restore")')
        picture = page.locator("dialog .move-picture")
        expect(page.locator("dialog")).to_contain_text("On its former GPUs if they are free")
        expect(picture).to_have_count(0)
        asked[0].continue_()
        expect(picture).to_contain_text("host memory→alpha/1")
        page.click('dialog button:text-is("Restore"):enabled')
        expect(page.locator("dialog .command .badge")).to_have_text("succeeded")
    assert fleet.fleet.leases() == {"alpha/1": "train"}


@pytest.mark.long
def test_a_dialog_learns_what_ended_during_a_gap(browser: Browser, web_fleet: WebFleet) -> None:
    """A snapshot after a gap has no ended workloads and commands."""
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"stop": {}}, "create_time": 1}
    pending, ended = ({**command, "state": state, "revision": 1} for state in ("PENDING", "SUCCEEDED"))
    workload = {"workload_id": "w-1", "name": "one"}
    exited = {"workload": {**workload, "status": {"state": "EXITED"}}, "commands": [], "events": []}
    running = [["workload", "w-1", {**workload, "status": {"state": "RUNNING"}}], ["command", "c-1", pending]]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def begin() -> None:
            page.goto(web_fleet.url)
            page.wait_for_function("() => Boolean(window.source?.onmessage)")
            expect(page.locator("#who")).to_contain_text("admin")
            page.evaluate("tell", {"reset": {}, "changes": running, "state": {}})

        def pass_a_gap() -> None:
            before = page.evaluate("opened")
            page.evaluate("source.onerror()")
            page.wait_for_function("(before) => opened > before && Boolean(source.onmessage)", arg=before)
            page.evaluate("tell", {"reset": {}, "state": {}})

        page.route("**/api/action", lambda route: route.fulfill(json={"commands": [pending]}))
        page.route("**/api/commands/c-1", lambda route: route.fulfill(json=ended))
        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=exited))
        page.add_init_script(SCRIPTED_STREAM)
        begin()
        page.evaluate(BESIDE)
        pass_a_gap()
        expect(page.locator("dialog .steps li")).to_have_text(["The workload has ended."])
        begin()
        page.evaluate(CANCEL)
        pass_a_gap()
        expect(page.locator("dialog .steps li").first).to_contain_text("The command has ended (succeeded)")
        begin()
        page.evaluate(BESIDE)
        page.click('dialog button:text-is("Stop")')
        badge = page.locator("dialog .command .badge")
        expect(badge).to_have_text("pending")
        pass_a_gap()
        expect(badge).to_have_text("succeeded")
        expect(page.locator('dialog button:text-is("Close")')).to_be_visible()


@pytest.mark.long
def test_a_plan_moves_no_focus_while_the_user_types_or_scrolls(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: asked.append(route))
        page.route("**/api/action", lambda route: route.fulfill(json={"commands": []}))
        told = page.locator("dialog footer [role=status]")

        def answer() -> None:
            next_request(page, asked).fulfill(json={"plans": [{}]})

        page.evaluate(DRAIN, 1)
        reason = page.locator("dialog #reason")
        expect(reason).to_be_focused()
        page.keyboard.type("replaces")
        answer()
        expect(told).to_have_text("The dry run is complete.")
        page.keyboard.type(" a fan")
        expect(reason).to_have_value("replaces a fan")
        page.keyboard.press("Escape")
        page.evaluate(SUSPEND)
        page.keyboard.press("Space")  # scrolls
        answer()
        expect(told).to_have_text("The dry run is complete.")
        expect(page.locator("dialog .body")).to_be_focused()
        page.keyboard.press("Escape")
        page.evaluate(SUSPEND)
        answer()
        expect(page.locator('dialog button:text-is("Suspend")')).to_be_focused()
        expect(told).to_have_text("")


UNKNOWN: Final = """async (state) => {
  const { commandView } = await import("/static/command_view.js");
  const what = { command_id: "c-1", worker_id: "worker-a", operation: { suspend: {} }, create_time: 1 };
  const view = commandView({ ...what, state });
  const link = view.querySelector("p a");
  return [view.querySelectorAll(".running-bar").length, view.querySelector("p")?.textContent ?? "",
    link ? link.getAttribute("href") : ""];
}"""


@pytest.mark.long
def test_a_command_of_a_host_out_of_contact_does_not_go_on(browser: Browser, web_fleet: WebFleet) -> None:
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        told = "Its host … is out of contact. The outcome is known when the host returns."
        assert page.evaluate(UNKNOWN, "UNKNOWN") == [0, told, "/workers/worker-a"]
        assert page.evaluate(UNKNOWN, "RUNNING") == [1, "", ""]
        changes = [["command", "c-1", {**command, "state": "UNKNOWN"}]]
        page.evaluate("tell", {"changes": changes, "state": {}})
        page.evaluate(CANCEL)
        expect(page.locator("dialog .steps li").first).to_contain_text("once the host returns")


@pytest.mark.long
def test_a_held_enter_opens_a_dialog_and_confirms_nothing(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}workloads/train")
        page.locator('button:text-is("Stop…")').focus()
        for _ in range(4):
            page.keyboard.down("Enter")  # after the first, a repetition
        expect(page.locator("dialog .body")).to_be_focused()
        stop = page.locator('dialog button:text-is("Stop")')
        assert stop.is_enabled()
        page.keyboard.up("Enter")
        for part in ("#force", 'dialog button:text-is("Cancel")', 'dialog button:text-is("Stop")'):
            page.keyboard.press("Tab")
            expect(page.locator(part)).to_be_focused()
        page.keyboard.down("Enter")
        close = page.locator('dialog button:text-is("Close")')
        expect(close).to_be_focused()
        page.keyboard.down("Enter")
        assert close.is_visible()
        page.keyboard.up("Enter")
        page.keyboard.press("Enter")
        expect(page.locator("dialog")).to_have_count(0)


@pytest.mark.long
def test_a_link_in_a_dialog_closes_the_dialog(browser: Browser, web_fleet: WebFleet) -> None:
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    answer = {"commands": [{**command, "state": "PENDING"}]}
    one = {"workload": {"workload_id": "w-1", "name": "one", "status": {}}, "commands": [], "events": []}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.context.route("**/api/workloads/w-1", lambda route: route.fulfill(json=one))
        page.route("**/api/plan", lambda route: route.fulfill(json={"plans": [{}]}))
        page.route("**/api/action", lambda route: route.fulfill(json=answer))
        page.evaluate(SUSPEND)
        page.click('dialog button:text-is("Suspend"):enabled')
        link = page.locator("dialog .command header a")
        with page.context.expect_page():
            link.click(modifiers=["ControlOrMeta"])
        expect(page.locator("dialog")).to_have_count(1)
        link.click()
        expect(page.locator("dialog")).to_have_count(0)
        expect(page.locator("h1")).to_have_text("one")


@pytest.mark.long
def test_a_dialog_tells_that_there_was_nothing_to_do(browser: Browser, web_fleet: WebFleet) -> None:
    command = {"command_id": "c-1", "workload_id": "w-1", "operation": {"suspend": {}}, "create_time": 1}
    done = {**command, "state": "SUCCEEDED", "result": {"already_there": True}}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: route.fulfill(json={"plans": [{"already_there": True}]}))
        page.route("**/api/action", lambda route: route.fulfill(json={"commands": [done]}))
        page.evaluate(SUSPEND)
        page.click('dialog button:text-is("Suspend"):enabled')
        told = page.locator("dialog footer [role=status]")
        expect(told).to_have_text("The suspend has ended: nothing to do.")
