"""The dialogs of stops, and the buttons that cancel a command."""

import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page
from .conftest import WebFleet
from .dialog_scripts import BESIDE, CANCEL

EFFECTS: Final = """async (status) => {
  const { workloadActions } = await import("/static/actions.js");
  const buttons = workloadActions({ workload_id: "w-1", name: "one", status });
  buttons.find((one) => one.textContent === "Stop…").click();
  const dialog = document.querySelector("dialog");
  const texts = [...dialog.querySelectorAll(".steps li")].map((one) => one.textContent);
  dialog.remove();
  return texts.slice(2);
}"""

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


@pytest.mark.long
def test_a_stop_tells_what_becomes_of_a_parked_state(browser: Browser, web_fleet: WebFleet) -> None:
    lost = "Its parked state is lost."
    kept = "Its checkpoint stays until it expires: leasehold run --from-checkpoint k-1 starts from it."
    older = (
        "Checkpoints that its application has made stay until they expire: "
        "leasehold run --from-checkpoint ID starts from one."
    )
    saved = {"checkpoint_id": "k-1", "disk_bytes": 9}
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        expect(page.locator("#who")).to_contain_text("admin")
        for status, told in (
            ({"state": "STOPPED", **saved}, [kept]),
            ({"state": "STOPPED", **saved, "disk_bytes": 0}, []),  # it was deleted
            ({"state": "STOPPED"}, []),
            ({"state": "CHECKPOINTED", **saved}, [lost]),
            ({"state": "SUSPENDED"}, [lost]),
            ({"state": "SUSPENDED", "kernel": {}}, [lost, older]),
            ({"state": "SLEEPING", "kernel": {}}, [lost, older]),
            ({"state": "RUNNING", "kernel": {}}, []),
        ):
            assert page.evaluate(EFFECTS, status) == told


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
        lost = re.compile("parked in memory or an image is lost")
        expect(effects).to_have_text([refused, lost, "It holds no GPU."])
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
        expect(effect).to_contain_text("rolls the operation back")
        tell(ended)
        expect(effect).to_have_text(f"The command has ended ({end.lower()}): there is nothing to cancel.")
        page.click('dialog button:text-is("Cancel the command")')
        expect(page.locator("dialog .command .badge")).to_have_text(end.lower())
        status = page.locator('dialog footer [role="status"]')
        expect(status).to_have_text(f"The suspend has ended: {end.lower()}.")
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
        expect(page.locator("dialog")).to_have_count(0)
        rows.get_by_role("button", name="Cancel the suspend: one-1").click()
        expect(page.locator("dialog h2")).to_have_text("Cancel the suspend: one-1")


@pytest.mark.long
@pytest.mark.parametrize("is_refused", [False, True])
def test_the_title_of_a_cancellation_gets_the_names_that_come_later(
    browser: Browser, web_fleet: WebFleet, *, is_refused: bool
) -> None:
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/names?*", lambda route: route.fulfill(json={}))
        page.route("**/api/history?*", lambda route: route.fulfill(json={"spans": []}))
        commands = {"commands": [{**command, "state": "RUNNING"}]}
        page.route("**/api/commands?*", lambda route: route.fulfill(json=commands))
        page.add_init_script(SCRIPTED_STREAM)
        page.goto(f"{web_fleet.url}commands")
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        page.evaluate("tell", {"reset": {}, "changes": [], "state": {"is_loading": True}})
        page.get_by_role("button", name="Cancel the suspend: …").click()
        title = page.locator("dialog h2")
        expect(title).to_have_text("Cancel the suspend: …")
        if is_refused:
            page.evaluate("tell", {"changes": [], "state": {"is_loading": True, "refused": "no role"}})
        else:
            row = {"workload_id": "w-1", "name": "one", "status": {"state": "RUNNING"}}
            page.evaluate("tell", {"changes": [["workload", "w-1", row]], "state": {}})
        expect(title).to_have_text(f"Cancel the suspend: {'w-1' if is_refused else 'one'}")


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
def test_a_dialog_tells_the_deletion_of_its_workload_or_command(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """The dialog keeps the last state until the answer of the server."""
    command = {"workload_id": "w-1", "command_id": "c-1", "operation": {"suspend": {}}, "create_time": 1}
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def tell(workload: str | None, state: str | None) -> None:
            row = workload and {"workload_id": "w-1", "name": "one", "status": {"state": workload}}
            changes = [["workload", "w-1", row], ["command", "c-1", state and {**command, "state": state}]]
            page.evaluate("tell", {"changes": changes, "state": {}})

        def expect_deletion(dialog: str, ended: str, deleted: str) -> None:
            tell("RUNNING", "RUNNING")
            page.evaluate(dialog)
            effect = page.locator("dialog .steps li").first
            tell("EXITED", "SUCCEEDED")
            expect(effect).to_have_text(ended)
            tell(None, None)
            answer = next_request(page, asked)
            expect(effect).to_have_text(ended)
            answer.fulfill(status=404, json={"message": "it is unknown"})
            expect(effect).to_have_text(deleted)
            page.keyboard.press("Escape")

        page.route("**/api/workloads/w-1", lambda route: asked.append(route))
        page.route("**/api/commands/c-1", lambda route: asked.append(route))
        page.add_init_script(SCRIPTED_STREAM)
        page.reload()
        page.wait_for_function("() => Boolean(window.source?.onmessage)")
        expect(page.locator("#who")).to_contain_text("admin")
        expect_deletion(BESIDE, "The workload has ended.", "The workload was deleted.")
        expect_deletion(
            CANCEL,
            "The command has ended (succeeded): there is nothing to cancel.",
            "The command was deleted: there is nothing to cancel.",
        )
