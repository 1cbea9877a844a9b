"""The dialogs of actions: refusals, long names, the focus, and their sentences."""

import json
import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page, slot
from .conftest import WebFleet

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
        page.click('dialog button:text-is("Cordon")', timeout=5_000)
        expect(page.locator("dialog footer")).to_have_text("Sending…CloseCordon")
        page.evaluate("passDeadline()")
        expect(page.locator("dialog .box.bad")).to_have_text(
            f"{LATE}. The command may have been stored: see Commands. "
            "“Cordon” again is safe: it is not carried out twice."
        )
        page.click('dialog button:text-is("Cordon")', timeout=5_000)
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
        page.click('dialog button:text-is("Cordon")', timeout=5_000)
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
def test_the_notice_of_a_closed_dialog_tells_the_refusals_of_a_drain(
    browser: Browser, fleet: WebFleet
) -> None:
    answer = {
        "commands": [{"command_id": "c-1"}, {"command_id": "c-2"}],
        "refusals": [{"workload_name": "train", "error": {"message": "train is busy: try again later"}}],
    }
    asked: list[Route] = []
    with open_page(browser, fleet.url, fleet.token) as page:
        page.route("**/api/action", lambda route: asked.append(route))
        page.goto(f"{fleet.url}workers/alpha")
        page.click('button:text-is("Drain…")')
        page.fill("dialog #reason", "a fan")
        page.click('dialog button:text-is("Drain"):enabled')
        page.click('dialog button:text-is("Close")')
        expect(page.locator(".notice")).to_contain_text("closed before the answer")
        asked[0].fulfill(json=answer)
        expect(page.locator(".notice p")).to_have_text(
            "Drain alpha: 2 commands are stored, see Commands. "
            "train is left as it is: train is busy: try again later."
        )


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


STOP: Final = """async (state) => {
  const { workloadActions } = await import("/static/actions.js");
  const buttons = workloadActions({ workload_id: "w-1", name: "one", status: { state } });
  buttons.find((one) => one.textContent === "Stop…").click();
  const dialog = document.querySelector("dialog");
  const text = dialog.querySelector(".steps li").textContent;
  dialog.remove();
  return text;
}"""


@pytest.mark.long
def test_a_stop_says_how_the_workload_ends(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        for states, told in (
            (("RUNNING", "SLEEPING"), "The first process gets SIGTERM."),
            (("SUSPENDED", "UNKNOWN", "WEDGED"), "All processes are killed at once"),
            (("CHECKPOINTED", "STOPPED"), "The workload ends at once, since it has no process."),
            (("SUSPENDING", "RESTORING"), "The worker changes this workload now. The stop is refused"),
        ):
            for state in states:
                assert page.evaluate(STOP, state).startswith(told)


BESIDE: Final = """async () => {
  const { workloadActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  workloadActions(live.workloads.get("w-1")).find((one) => one.textContent === "Stop…").click();
}"""


@pytest.mark.long
def test_a_stop_beside_another_command_tells_its_effects_and_that_it_is_refused_now(
    browser: Browser, web_fleet: WebFleet
) -> None:
    suspend = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(state: str, command: str, **more: object) -> None:
            workload = {"workload_id": "w-1", "name": "one", "status": {"state": state}, **more}
            changes = [["workload", "w-1", workload], ["command", "c-1", {**suspend, "state": command}]]
            page.evaluate("tell", {"changes": changes, "state": {}})

        page.route("**/api/commands/c-1", lambda route: route.fulfill(json={**suspend, "state": "RUNNING"}))
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        tell("RUNNING", "PENDING")
        page.evaluate(BESIDE)
        effects = page.locator("dialog .steps li")
        refused = (
            "Another command of this workload has not ended: suspend. The stop is refused until its end."
        )
        expect(effects).to_have_text([refused, re.compile("SIGTERM"), "It holds no GPU."])
        tell("SUSPENDING", "RUNNING")
        expect(effects).to_have_text([refused, re.compile("a parked state is lost"), "It holds no GPU."])
        tell("SUSPENDED", "SUCCEEDED")
        killed = re.compile("All processes are killed at once")
        expect(effects).to_have_text([killed, "It holds no GPU.", "Its parked state is lost."])
        expect(page.locator('dialog button:text-is("Stop")')).to_be_enabled()
        tell("EXITED", "SUCCEEDED")
        expect(effects).to_have_text(["The workload has ended."])
        stale = {"worker_id": "worker-a", "name": "alpha", "state": "STALE"}
        page.evaluate("tell", {"changes": [["worker", "worker-a", stale]], "state": {}})
        tell("RUNNING", "SUCCEEDED", worker_id="worker-a")
        silent = "The host alpha is out of contact. The stop is refused until it returns."
        expect(effects).to_have_text([silent, re.compile("SIGTERM"), "It holds no GPU."])
        tell("SUSPENDED", "RUNNING")
        page.click('dialog a:text-is("suspend")')
        page.wait_for_url("**/commands/c-1")
        expect(page.locator("dialog")).to_have_count(0)


@pytest.mark.long
def test_a_stop_that_was_refused_beside_another_command_is_possible_after_it(
    browser: Browser, web_fleet: WebFleet
) -> None:
    suspend = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    busy = {"reason": "WORKLOAD_BUSY", "message": "one has a command under way: try again later"}
    invalid = {"reason": "INVALID_ARGUMENT", "message": "the stop is malformed"}
    answers = [busy, busy, invalid]
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def tell(state: str, command: str) -> None:
            workload = {"workload_id": "w-1", "name": "one", "status": {"state": state}}
            changes = [["workload", "w-1", workload], ["command", "c-1", {**suspend, "state": command}]]
            page.evaluate("tell", {"changes": changes, "state": {}})

        page.route("**/api/action", lambda route: route.fulfill(status=409, json=answers.pop(0)))
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        tell("RUNNING", "RUNNING")
        page.evaluate(BESIDE)
        button = page.locator('dialog button:text-is("Stop")')
        refused = page.locator("dialog .box.bad")
        button.click()
        expect(refused).to_have_text(busy["message"])
        tell("RUNNING", "RUNNING")
        page.wait_for_timeout(100)
        expect(button).to_be_disabled()  # nothing has changed
        tell("SUSPENDED", "SUCCEEDED")
        expect(refused).to_have_count(0)
        expect(button).to_be_enabled()
        button.click()
        expect(refused).to_have_text(busy["message"])
        tell("EXITED", "SUCCEEDED")
        expect(page.locator("dialog .steps li")).to_have_text(["The workload has ended."])
        expect(button).to_be_disabled()
        tell("RUNNING", "SUCCEEDED")
        expect(button).to_be_enabled()
        button.click()
        expect(refused).to_have_text(invalid["message"])
        tell("SUSPENDED", "SUCCEEDED")
        expect(page.locator("dialog .steps li").first).to_contain_text("All processes")
        expect(button).to_be_disabled()


CANCEL: Final = """async () => {
  const { commandActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  commandActions(live.commands.get("c-1"))[0].click();
}"""


@pytest.mark.long
@pytest.mark.parametrize("end", ["SUCCEEDED", "CANCELLED"])
def test_a_cancellation_tells_the_end_of_its_command(browser: Browser, web_fleet: WebFleet, end: str) -> None:
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    ended = {**command, "state": end, "end_time": 2, "revision": 2}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(row: dict[str, object]) -> None:
            page.evaluate("tell", {"changes": [["command", "c-1", row]], "state": {}})

        page.route("**/api/action", lambda route: route.fulfill(json={"commands": [ended]}))
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        tell({**command, "state": "RUNNING", "revision": 1})
        page.evaluate(CANCEL)
        effect = page.locator("dialog .steps li").first
        expect(effect).to_contain_text("rolls it back")
        tell(ended)
        expect(effect).to_have_text(
            f"The command has ended ({end.lower()}): there is nothing to cancel.", timeout=10_000
        )
        page.click('dialog button:text-is("Cancel the command")')
        expect(page.locator("dialog .command .badge")).to_have_text(end.lower())
        status = page.locator('dialog footer [role="status"]')
        expect(status).to_have_text(f"The suspend has ended: {end.lower()}.", timeout=10_000)
        told = page.get_by_text("The command was not cancelled.")
        expect(told).to_have_count(0 if end == "CANCELLED" else 1)


@pytest.mark.long
def test_a_click_cancels_no_command_that_has_moved_below_the_pointer(
    browser: Browser, web_fleet: WebFleet
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(number: int) -> None:
            names = {"workload_id": f"w-{number}", "name": f"one-{number}", "status": {"state": "RUNNING"}}
            command = {"command_id": f"c-{number}", "workload_id": f"w-{number}", "create_time": number}
            row = {**command, "operation": {"suspend": {}}, "state": "RUNNING"}
            changes = [["workload", f"w-{number}", names], ["command", f"c-{number}", row]]
            page.evaluate("tell", {"changes": changes, "state": {}})

        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}commands")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        tell(1)
        rows = page.locator('[aria-label="Under way"] .command')
        rows.locator("button").hover()
        page.mouse.down()
        tell(2)  # the latest is on top, where the pointer is
        expect(rows).to_have_count(2)
        page.mouse.up()
        expect(page.locator("dialog")).to_have_count(0, timeout=5_000)
        rows.get_by_role("button", name="Cancel the suspend: one-1").click()
        expect(page.locator("dialog h2")).to_have_text("Cancel the suspend: one-1")


CANCELLABLE: Final = """async (commands) => {
  const { commandActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  const cancellable = (session) => {
    live.session = session;
    return commands.filter((one) => commandActions({ ...one, state: "RUNNING" }).length).map((one) => one.id);
  };
  return [
    cancellable({ identity: "user/alice", role: "USER" }),
    cancellable({ identity: "user/alice", role: "VIEWER" }),
    cancellable({ identity: "service/portal", on_behalf_of: "user/alice", role: "USER" }),
    cancellable({ identity: "user/carol", role: "OPERATOR" }),
  ];
}"""


@pytest.mark.long
def test_only_a_command_that_the_caller_may_cancel_has_a_button_for_it(
    browser: Browser, web_fleet: WebFleet
) -> None:
    alice, bob = "user/alice", "user/bob"
    commands: list[dict[str, object]] = [
        {"id": "hidden"},  # of others
        {"id": "own", "actor": alice},
        {"id": "by a service", "actor": "service/portal", "on_behalf_of": alice},
        {"id": "of own workloads", "actor": bob, "owners": [alice, alice]},
        {"id": "shared", "actor": bob, "owners": [alice, bob]},
    ]
    own = ["own", "by a service", "of own workloads"]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        assert page.evaluate(CANCELLABLE, commands) == [own, [], own, [one["id"] for one in commands]]


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


DRAIN: Final = """async (number) => {
  const { workerActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const ids = Array.from({ length: number }, (_, at) => `w-${at}`);
  const status = { state: "RUNNING", lease: { gpu_uuids: ["GPU-1"] } };
  for (const id of ids) live.workloads.set(id, { workload_id: id, name: id, status });
  live.workloadsOf.set("worker-a", ids);
  workerActions({ worker_id: "worker-a", name: "alpha" })[1].click();
}"""


@pytest.mark.long
def test_a_drain_tells_how_many_workloads_have_no_plan(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: route.fulfill(json={"plans": [{}]}))
        steps = page.locator("dialog > form > .body > .steps li")
        page.evaluate(DRAIN, 32)
        expect(steps).to_have_count(2)
        page.keyboard.press("Escape")
        page.evaluate(DRAIN, 40)
        expect(steps).to_have_count(3)
        expect(steps.last).to_have_text("32 of them have a plan below, and 8 more are without a plan here.")
        expect(page.locator("dialog h3")).to_have_count(32)


SUSPEND: Final = """async () => {
  const { workloadActions } = await import("/static/actions.js");
  const status = { state: "RUNNING", lease: { gpu_uuids: ["GPU-1"] } };
  workloadActions({ workload_id: "w-1", name: "one", status })[0].click();
}"""


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


@pytest.mark.long
def test_a_failed_plan_is_asked_for_again_and_forbids_no_drain(browser: Browser, web_fleet: WebFleet) -> None:
    late = "the coordinator did not answer in time: try again"
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: asked.append(route))
        plans = page.locator("dialog .plan")
        failed = page.locator("dialog section .box.bad")

        def answer(status: int, document: dict[str, object]) -> None:
            next_request(page, asked).fulfill(status=status, json=document)

        page.evaluate(DRAIN, 3)
        drain = page.locator('dialog button:text-is("Drain")')
        expect(drain).to_be_enabled()
        expect(page.locator("dialog h3")).to_have_text(["w-0", "w-1", "w-2"])
        answer(200, {"plans": [{}]})
        expect(plans).to_have_count(1)
        answer(504, {"reason": "", "message": late})
        expect(failed).to_contain_text(late)
        answer(200, {"plans": [{}]})
        expect(plans).to_have_count(2)
        expect(drain).to_be_enabled()
        page.click('dialog button:text-is("Ask again")')
        answer(200, {"plans": [{}]})
        expect(plans).to_have_count(3)
        expect(failed).to_have_count(0)
        page.keyboard.press("Escape")
        page.evaluate(SUSPEND)
        suspend = page.locator('dialog button:text-is("Suspend")')
        answer(403, {"reason": "NOT_PERMITTED", "message": "ask an operator"})
        expect(failed).to_have_text("ask an operator")
        expect(suspend).to_be_disabled()
        page.keyboard.press("Escape")
        page.evaluate(SUSPEND)
        answer(429, {"message": "too many requests"})
        page.click('dialog button:text-is("Ask again")')
        expect(suspend).to_be_disabled()
        answer(200, {"plans": [{"refusals": [{"message": "it is busy"}]}]})
        expect(plans).to_contain_text("it is busy")
        expect(suspend).to_be_disabled()
        page.click('dialog button:text-is("Ask again")')
        answer(200, {"plans": [{}]})
        expect(suspend).to_be_enabled()


@pytest.mark.long
def test_a_drain_waits_for_no_plan(browser: Browser, web_fleet: WebFleet) -> None:
    """A plan that comes later does not cover the refusal of the drain."""
    silent = {"reason": "WORKER_UNAVAILABLE", "message": "alpha is not in contact: try again later"}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: asked.append(route))
        page.route("**/api/action", lambda route: route.fulfill(status=503, json=silent))
        page.evaluate(DRAIN, 2)
        page.fill("dialog #reason", "a fan")
        page.click('dialog button:text-is("Drain")')
        expect(page.locator("dialog .box.bad")).to_have_text(silent["message"])
        page.wait_for_timeout(200)
        assert len(asked) == 1
        expect(page.locator("dialog h3")).to_have_count(0)


@pytest.mark.long
def test_a_drain_tells_memory_of_all_its_plans_and_changes_of_its_workloads(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """Each plan is asked for once. The fourth workload is refused, so it needs no memory."""
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(json.loads(route.request.post_data or "")["workload"])
        tiers = [
            {"tier": "HOST", "needed_bytes": 80 * 2**30, "available_bytes": (300 - len(asked)) * 2**30},
            {"tier": "DEVICE", "needed_bytes": 2**40},
        ]
        refusals = [{"message": "it is busy"}] if asked[-1] == "w-3" else []
        route.fulfill(json={"plans": [{"tiers": tiers, "refusals": refusals}]})

    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(name: str, **status: object) -> None:
            row = {"workload_id": name, "name": name, "worker_id": "worker-a", "status": status}
            page.evaluate("tell", {"changes": [["workload", name, row]], "state": {}})

        page.route("**/api/plan", answer)
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        page.evaluate("tell", {"state": {}})
        page.evaluate(DRAIN, 4)
        steps = page.locator("dialog > form > .body > .steps li")
        plans = page.locator("dialog .plan")
        warning = page.locator("dialog .body > div > [role=status]")
        expect(plans).to_have_count(4)
        expect(warning).to_be_empty()
        tell("w-5", state="RUNNING", lease={"gpu_uuids": ["GPU-5"]})
        expect(plans).to_have_count(5)
        expect(warning).to_have_text(
            re.compile("^Together, these plans need 320 GiB of host memory, and 295 GiB are available.")
        )
        changed = "The list has changed since this dialog was opened. New: w-5."
        expect(steps).to_have_text([re.compile("cordoned first"), re.compile("^Then 5 "), changed])
        tell("w-0", state="SUSPENDED")
        expect(steps.last).to_have_text(f"{changed} Without GPUs now: w-0.")
        expect(page.locator("dialog section > h3")).to_have_text(["w-1", "w-2", "w-3", "w-5"])
        expect(warning).to_be_empty()
        tell("w-5", state="EXITED")
        tell("w-0", state="RUNNING", lease={"gpu_uuids": ["GPU-1"]})
        expect(steps).to_have_count(2)
        expect(plans).to_have_count(4)
    assert asked == ["w-0", "w-1", "w-2", "w-3", "w-5", "w-0"]


@pytest.mark.long
def test_a_drain_whose_suspends_are_refused_shows_its_stored_cordon(
    browser: Browser, web_fleet: WebFleet
) -> None:
    problem = "Nothing was suspended after the cordon: alpha is not in contact: try again later"
    cordon = {"command_id": "c-1", "worker_id": "worker-a", "operation": {"cordon": {}}, "create_time": 1}
    answer = {"commands": [{**cordon, "state": "PENDING"}], "problem": problem}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/action", lambda route: asked.append(route))

        def confirm() -> None:
            page.evaluate(DRAIN, 0)
            page.fill("dialog #reason", "a fan")
            page.click('dialog button:text-is("Drain")')

        confirm()
        next_request(page, asked).fulfill(json=answer)
        expect(page.locator("dialog .box.bad")).to_have_text(problem)
        expect(page.locator("dialog .command .badge")).to_have_text("pending")
        page.keyboard.press("Escape")
        confirm()
        page.click('dialog button:text-is("Close")')
        next_request(page, asked).fulfill(json=answer)
        expect(page.locator(".notice p")).to_have_text(
            f"Drain alpha: 1 command is stored, see Commands. {problem}."
        )


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
        told = "Its host worker-a is out of contact. The outcome is known when the host returns."
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


UNCORDON: Final = """async ([worker, uuids]) => {
  const { gpuActions, workerActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  document.querySelector("dialog")?.close();
  const actions = uuids ? gpuActions(live.gpus.get(uuids)) : workerActions(live.workers.get(worker));
  actions.find((one) => one.textContent === "Uncordon").click();
}"""


@pytest.mark.long
def test_a_refusal_that_may_pass_leaves_a_way_to_go_on(browser: Browser, web_fleet: WebFleet) -> None:
    busy = {"reason": "WORKLOAD_BUSY", "message": "one has a command under way: try again later"}
    many = {"message": "24 requests of this session are under way: wait for their answers"}
    worker = {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED", "cordon": {"reason": "a fan"}}
    answers: list[tuple[int, dict[str, object]]] = [(409, {**busy}), (429, {**many}), (429, {**many})]
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def refuse(route: Route) -> None:
            status, document = answers.pop(0)
            route.fulfill(status=status, json=document)

        page.route("**/api/plan", lambda route: route.fulfill(json={"plans": [{}]}))
        page.route("**/api/action", refuse)
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        page.evaluate("tell", {"changes": [["worker", "worker-a", worker]], "state": {}})
        page.evaluate(SUSPEND)
        suspend = page.locator('dialog button:text-is("Suspend")')
        refused = page.locator("dialog .box.bad")
        for message in (busy["message"], many["message"]):
            page.click('dialog button:text-is("Suspend"):enabled')
            expect(refused).to_have_text(f"{message}. Ask again")
            expect(suspend).to_be_disabled()
            expect(page.locator('dialog button:text-is("Ask again")')).to_be_focused()
            page.click('dialog button:text-is("Ask again")')
            expect(page.locator("dialog .plan")).to_be_visible()
            expect(refused).to_have_count(0)
            expect(suspend).to_be_enabled()
        page.evaluate(UNCORDON, ["worker-a", None])
        uncordon = page.locator('dialog button:text-is("Uncordon")')
        uncordon.click()
        expect(refused).to_have_text(many["message"])
        expect(uncordon).to_be_enabled()
    assert answers == []


@pytest.mark.long
def test_an_uncordon_tells_which_gpus_get_no_new_lease(browser: Browser, web_fleet: WebFleet) -> None:
    fan, cable = {"reason": "a fan", "cordon_time": 1}, {"reason": "a cable", "cordon_time": 2}
    worker = {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}

    def gpu(slot: int, **row: object) -> list[object]:
        row = {"uuid": f"GPU-{slot}", "worker_id": "worker-a", "slot": slot, "state": "CORDONED", **row}
        return ["gpu", f"GPU-{slot}", row]

    gpus = [
        gpu(0, cordon=fan),  # as the free GPUs of a cordoned host
        gpu(1, cordon=cable),
        gpu(2, state="UNHEALTHY", health="DOUBLE_BIT_ECC", cordon=cable),
    ]
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def tell(**row: object) -> None:
            changes = [["worker", "worker-a", {**worker, **row}], *gpus]
            page.evaluate("tell", {"changes": changes, "state": {}})

        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        steps = page.locator("dialog .steps li")
        again = "New leases are granted again."
        unhealthy = "Unhealthy GPUs get no new lease: alpha/2 (double bit ecc)."
        tell()
        page.evaluate(UNCORDON, ["worker-a", "GPU-1"])
        expect(steps).to_have_text([again])
        page.evaluate(UNCORDON, ["worker-a", "GPU-2"])
        expect(steps).to_have_text([unhealthy])
        page.keyboard.press("Escape")
        page.click(slot(page, 1))
        button = page.locator('.drawer button:text-is("Uncordon")')
        expect(button).to_have_count(1)
        tell(cordon=fan)
        button.click()
        expect(steps).to_have_text(["The host alpha stays cordoned, so no new lease is granted."])
        page.keyboard.press("Escape")
        page.click(slot(page, 0))
        expect(page.locator(".drawer h2")).to_have_text("alpha/0")
        expect(button).to_have_count(0)  # it shows the cordon of its host
        page.evaluate(UNCORDON, ["worker-a", None])
        own = "GPUs with a cordon of their own stay cordoned: alpha/1, alpha/2."
        expect(steps).to_have_text([again, own, unhealthy])
