"""Windows of a browser: streams of hidden windows, and what a window shows after a gap of its live view."""

import re
import signal
from typing import Final

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, expect_state, next_request, open_page
from .conftest import WebFleet

HIDDEN = """
window.isHidden = true;
Object.defineProperty(document, "hidden", { get: () => window.isHidden });
Object.defineProperty(document, "visibilityState", { get: () => (window.isHidden ? "hidden" : "visible") });
"""
RELEASED_MS = 31_000


def open_hidden(context: BrowserContext, url: str) -> Page:
    """Opens a window that is hidden from its start, as a middle click does."""
    page = context.new_page()
    page.clock.install()
    page.add_init_script(HIDDEN)
    page.goto(url)
    return page


def show(page: Page) -> None:
    """Shows a hidden window."""
    page.evaluate("isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")


def hide(page: Page) -> None:
    """Hides it again."""
    page.evaluate("isHidden = true; document.dispatchEvent(new Event('visibilitychange'))")


@pytest.mark.long
def test_hidden_windows_give_all_streams_back_and_take_them_again(browser: Browser, fleet: WebFleet) -> None:
    """A browser has six connections to a server, and the page of a workload has two streams."""
    workload = f"{fleet.url}workloads/train"
    with open_page(browser, fleet.url, fleet.token) as page:
        expect_state(page, 0, "LEASED")
        page.goto("about:blank")
        hidden = [open_hidden(page.context, workload) for _ in range(2)]
        for one in hidden:
            show(one)
            expect(one.locator(".output")).to_contain_text(re.compile(r"\d"))
            hide(one)
        hidden += [open_hidden(page.context, fleet.url) for _ in range(2)]
        for one in hidden:
            one.clock.fast_forward(RELEASED_MS)
        page.goto(fleet.url)
        expect_state(page, 0, "LEASED")
        before = hidden[0].locator(".output").text_content()
        fleet.fleet.cli("suspend", "train")
        expect_state(page, 0, "FREE")
        page.goto("about:blank")
        assert hidden[0].locator(".badge").first.text_content() == "running and ready"
        for one in hidden[:2]:
            show(one)
            expect(one.locator(".badge").first).to_have_text("suspended")
            expect(one.locator(".output")).not_to_have_text(before or "")
        show(hidden[2])
        expect_state(hidden[2], 0, "FREE")


OUTPUTS: Final = """
window.outputs = 0;
window.EventSource = class {
  constructor(url) {
    this.isOutput = url.includes("/output");
    if (this.isOutput) outputs += 1;
  }
  addEventListener() {}
  close() {
    if (this.isOutput) outputs -= 1;
  }
};
"""


@pytest.mark.long
def test_only_the_window_that_was_used_last_has_an_output(browser: Browser, web_fleet: WebFleet) -> None:
    """A browser has six connections to a server. An idle output needs one, too."""
    workload = {"workload_id": "w-1", "name": "one", "status": {"state": "RUNNING"}}
    answer = {"workload": workload, "commands": [], "events": []}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.context.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.context.add_init_script(OUTPUTS)
        other = page.context.new_page()
        for window, rest in ((page, other), (other, page)):
            window.goto(f"{web_fleet.url}workloads/w-1")
            window.wait_for_function("() => outputs === 1")
            rest.wait_for_function("() => !window.outputs")
        expect(page.get_by_label("Output", exact=True).first).to_contain_text("paused: another window")
        page.evaluate("window.dispatchEvent(new Event('focus'))")
        page.wait_for_function("() => outputs === 1")
        other.wait_for_function("() => !outputs")
        for window, rest in ((other, page), (page, other)):  # a window that had the focus all the time
            window.keyboard.press("Shift")
            window.wait_for_function("() => outputs === 1")
            rest.wait_for_function("() => !outputs")
        hidden = page.context.new_page()
        hidden.add_init_script(HIDDEN)
        hidden.goto(f"{web_fleet.url}workloads/w-1")
        expect(hidden.locator(".output")).to_be_attached()
        assert [one.evaluate("outputs") for one in (hidden, page)] == [0, 1]


@pytest.mark.long
def test_an_output_is_shown_once_the_role_is_known(browser: Browser, web_fleet: WebFleet) -> None:
    workload = {"workload_id": "w-1", "name": "one", "status": {"state": "RUNNING"}}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        answer = {"workload": workload, "commands": [], "events": []}
        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.route("**/api/session", lambda route: asked.append(route))
        page.add_init_script(OUTPUTS)
        page.goto(f"{web_fleet.url}workloads/w-1")
        expect(page.locator("h1")).to_contain_text("one")
        expect(page.locator(".output")).to_have_count(0)
        next_request(page, asked).continue_()
        expect(page.locator(".output")).to_be_attached()
        page.wait_for_function("() => outputs === 1")


@pytest.mark.long
def test_a_window_catches_up_with_what_ended_during_a_gap(browser: Browser, fleet: WebFleet) -> None:
    """No snapshot has ended workloads and commands, so the views ask for them again."""
    worker = fleet.fleet.processes["alpha"]
    workload = fleet.fleet.client.workload("train").workload_id
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto("about:blank")
        worker.send_signal(signal.SIGSTOP)
        try:
            command = fleet.fleet.json("suspend", "train", "--no-wait")["command_id"]
            paths = ("workloads", f"workloads/{workload}", "commands", f"commands/{command}")
            hidden = [open_hidden(page.context, f"{fleet.url}{path}") for path in paths]
            workloads, one, commands, other = hidden
            expect(workloads.locator("tbody tr")).to_contain_text("running and ready")
            expect(one.locator('button:text-is("Stop…")')).to_be_visible()
            expect(commands.locator('[aria-label="Under way"]')).to_contain_text("suspend")
            expect(other.locator('button:text-is("Cancel…")')).to_be_visible()
            for window in hidden:
                window.clock.fast_forward(RELEASED_MS)
        finally:
            worker.send_signal(signal.SIGCONT)
        fleet.fleet.wait(lambda: fleet.fleet.client.command(command).HasField("end_time"))
        fleet.fleet.cli("stop", "train")
        fleet.fleet.end("coordinator", signal.SIGTERM)  # a server keeps its watches for a while
        fleet.fleet.start_coordinator()
        for window in hidden:
            show(window)
        expect(workloads.locator("tbody tr")).to_contain_text("exited")
        expect(one.locator(".title-line")).to_contain_text("exited")
        expect(one.locator(".title-line button")).to_have_count(0)
        expect(commands.locator('[aria-label="Under way"]')).to_contain_text("No command is under way")
        expect(commands.locator('[aria-label="Past"]')).to_contain_text("stop")  # began and ended in the gap
        expect(other.locator(".badge")).to_have_text("succeeded")


@pytest.mark.long
def test_a_deletion_reaches_the_list_and_the_pages_of_a_workload_and_a_host(
    browser: Browser, fleet: WebFleet
) -> None:
    fleet.fleet.cli("stop", "train")
    with open_page(browser, fleet.url, fleet.token, Complaints()) as page:
        page.goto(f"{fleet.url}workloads")
        other = page.context.new_page()
        other.goto(f"{fleet.url}workloads/train")
        expect(page.locator("tbody tr")).to_contain_text("train")
        expect(other.locator("h1")).to_contain_text("train")
        parts = [page.locator("tbody tr"), *map(other.get_by_label, ("State", "Commands"))]
        for part in parts:
            expect(part).to_contain_text(re.compile(r"\d s ago"))
        for part, text in [(part, part.text_content() or "") for part in parts]:
            expect(part).not_to_have_text(text)  # though nothing has changed
        fleet.fleet.cli("rm", "workload", "train", "--yes")
        expect(page.locator("tbody tr")).to_contain_text("No workload yet")
        expect(other.locator(".box.bad")).to_have_text("The workload train was deleted.")
        other.goto(f"{fleet.url}workers/alpha")
        expect(other.locator("h1")).to_contain_text("alpha")
        fleet.fleet.end("alpha", signal.SIGTERM)
        fleet.fleet.cli("rm", "worker", "alpha", "--yes")
        expect(other.locator(".box.bad")).to_have_text("The host alpha was deleted.")


@pytest.mark.long
def test_a_gap_between_the_server_and_the_coordinator_is_caught_up(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """The window keeps its stream meanwhile."""
    command = {"command_id": "c-1", "operation": {"stop": {}}, "create_time": 1, "end_time": 2}
    commands: list[dict[str, object]] = []
    answer = {"commands": commands, "next_page_token": ""}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/commands?*", lambda route: route.fulfill(json=answer))
        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}commands")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        past = page.locator('[aria-label="Past"]')
        page.evaluate("tell", {"reset": {}, "state": {}})
        expect(past).to_contain_text("No command has ended yet.")
        commands.append({**command, "state": "SUCCEEDED"})
        page.evaluate("tell", {"gap": {}, "state": {}})
        expect(past).to_contain_text("stop")


ENDED_COMMANDS: Final = """async () => {
  const { live } = await import("/static/live.js");
  const changes = Array.from({ length: 1100 }, (_, at) => ["command", `c-${at}`, { state: "FAILED" }]);
  tell({ reset: true, changes: [...changes, ["command", "open", { state: "RUNNING" }]], state: {} });
  return live.commands.size;
}"""

KEPT_COMMANDS: Final = """async () => {
  const { live } = await import("/static/live.js");
  tell({ reset: true, state: {} });
  return [live.commands.size, live.commands.has("open")];
}"""


@pytest.mark.long
def test_ended_commands_whose_end_is_hidden_are_kept_within_a_bound(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A user sees the state of others' commands, and not their end. No snapshot has ended commands."""
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        kept = page.evaluate(ENDED_COMMANDS)
        assert 512 <= kept <= 1024
        page.evaluate("source.onerror()")
        page.wait_for_function("() => opened > 1 && Boolean(source.onmessage)")
        assert page.evaluate(KEPT_COMMANDS) == [kept - 1, False]


ENDED_WORKLOADS: Final = """async () => {
  const { live } = await import("/static/live.js");
  const row = (id, state) => ["workload", id, { workload_id: id, worker_id: "worker-a", status: { state } }];
  const ended = Array.from({ length: 1100 }, (_, at) => row(`w-${at}`, "EXITED"));
  const open = Array.from({ length: 1100 }, (_, at) => row(`open-${at}`, "RUNNING"));
  tell({ reset: true, changes: [...open, ...ended], state: {} });
  const of = (some) => [some.filter((id) => id.startsWith("open")).length, some.length];
  return [of([...live.workloads.keys()]), of(live.workloadsOf.get("worker-a")), live.workloads.has("w-1099")];
}"""


@pytest.mark.long
def test_ended_workloads_are_kept_within_a_bound(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        assert page.evaluate(ENDED_WORKLOADS) == [[1_100, 1_612], [1_100, 1_612], True]


@pytest.mark.long
def test_a_window_that_is_shown_again_says_that_it_has_no_contact_yet(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A network may keep the new stream without an answer."""
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.clock.install()
        page.add_init_script(HIDDEN + SCRIPTED_STREAM)
        page.reload()
        show(page)
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        page.evaluate("tell", {"reset": {}, "state": {}})
        contact = page.locator("#contact")
        hide(page)
        page.clock.fast_forward(RELEASED_MS)
        before = page.evaluate("opened")
        show(page)
        assert page.evaluate("opened") == before + 1
        expect(contact).to_contain_text("No contact since")
        expect(contact).to_contain_text("The page shows the state of")
        page.evaluate("tell", {"reset": {}, "state": {}})
        expect(contact).to_be_empty()
