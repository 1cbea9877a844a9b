"""Open dialogs with a plan, after changes of what the plan depends on."""

import itertools
import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page, slot
from .conftest import WebFleet

OPEN: Final = """async (button) => {
  const { workloadActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  workloadActions(live.workloads.get("w-1")).find((one) => one.textContent === button).click();
}"""

TELL_AND_PRESS: Final = """(message) => {
  tell(message);
  document.querySelector("dialog button[type=submit]").click();
}"""

PLANNED_AGAIN: Final = "The plan is asked for again."
CHANGED: Final = "What will happen has changed."
COMPLETE: Final = f"{CHANGED} The dry run is complete."


def begin(page: Page) -> None:
    """Loads the page with a stream whose changes the test tells."""
    page.add_init_script(SCRIPTED_STREAM)
    page.reload()
    page.wait_for_function("() => Boolean(window.source?.onmessage)")
    expect(page.locator("#who")).to_contain_text("admin")
    worker = ["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}]
    page.evaluate("tell", {"reset": {}, "changes": [worker, *(gpu(one) for one in range(3))], "state": {}})


def gpu(number: int, state: str = "FREE", **more: object) -> list[object]:
    """A GPU of alpha in the live view."""
    row = {"uuid": f"GPU-{number}", "worker_id": "worker-a", "slot": number, "state": state, **more}
    return ["gpu", f"GPU-{number}", row]


def workload(state: str, generation: int, *held: str, **status: object) -> list[object]:
    """The workload of these tests in the live view."""
    found = {"state": state, "generation": generation, "lease": {"gpu_uuids": held}, **status}
    row = {"workload_id": "w-1", "name": "one", "worker_id": "worker-a", "status": found}
    return ["workload", "w-1", row]


@pytest.mark.long
def test_an_outdated_plan_permits_no_action(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    sent: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def tell(*changes: list[object]) -> None:
            page.evaluate("tell", {"changes": changes, "state": {}})

        def answer(step: str) -> None:
            next_request(page, asked).fulfill(json={"plans": [{"steps": [step]}]})

        page.route("**/api/plan", lambda route: asked.append(route))
        page.route("**/api/action", lambda route: sent.append(route))
        begin(page)
        tell(workload("RUNNING", 1, "GPU-0"))
        page.evaluate(OPEN, "Suspend")
        button = page.locator('dialog button:text-is("Suspend")')
        picture = page.locator("dialog .move-picture")
        steps = page.locator("dialog .plan .steps li")
        told = page.locator("dialog footer [role=status]")
        answer("first")
        expect(button).to_be_focused()
        # A press in the frame of the change sends nothing.
        page.evaluate(TELL_AND_PRESS, {"changes": [workload("RUNNING", 2, "GPU-1")], "state": {}})
        expect(told).to_have_text(CHANGED)
        expect(picture).to_have_text("alpha/1→parked")
        expect(steps).to_have_count(0)
        expect(button).to_be_disabled()
        expect(page.locator("dialog .body")).to_be_focused()
        outdated = next_request(page, asked)
        for generation in (3, 4, 5):
            tell(workload("RUNNING", generation, "GPU-2"))
            page.evaluate("() => new Promise(requestAnimationFrame)")
        expect(picture).to_have_text("alpha/2→parked")
        assert asked == []  # one plan at a time
        outdated.fulfill(json={"plans": [{"steps": ["outdated"]}]})
        last = next_request(page, asked)
        expect(button).to_be_disabled()
        expect(steps).to_have_count(0)
        last.fulfill(json={"plans": [{"steps": ["last"]}]})
        expect(steps).to_have_text("last")
        expect(told).to_have_text(COMPLETE)
        expect(button).to_be_enabled()
        expect(button).not_to_be_focused()
        tell(
            gpu(0, "LEASED"), workload("RUNNING", 5, "GPU-2", ready_time=1)
        )  # the plan does not depend on them
        expect(page.locator(slot(page, 0))).to_have_attribute("data-state", "LEASED")
        expect(button).to_be_enabled()
        tell(workload("SUSPENDED", 6, parked_gpu_uuids=["GPU-2"]))
        expect(picture).to_have_count(0)
        refused = {"refusals": [{"message": "it is busy"}]}
        next_request(page, asked).fulfill(json={"plans": [refused]})
        page.locator('dialog button:text-is("Ask again")').focus()
        tell(workload("SUSPENDED", 7, parked_gpu_uuids=["GPU-2"]))  # its button goes
        expect(page.locator("dialog .body")).to_be_focused()
        next_request(page, asked).fulfill(json={"plans": [{"already_there": True}]})
        expect(page.locator("dialog .box.good")).to_contain_text("There is nothing to do")
        assert sent == []
        # The repetition after an error stays safe, also if the first request has changed the state.
        button.click()
        next_request(page, sent).abort()
        expect(page.locator("dialog .box.bad")).to_contain_text("“Suspend” again is safe")
        tell(workload("SUSPENDING", 8, "GPU-2"))
        expect(told).to_have_text(CHANGED)
        expect(button).to_be_enabled()
        assert asked == []


@pytest.mark.long
def test_the_plan_of_a_restore_follows_the_gpus_of_its_host(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def change(*changes: list[object]) -> None:
            page.evaluate("tell", {"changes": changes, "state": {}})
            expect(page.locator("dialog footer [role=status]")).to_have_text(
                re.compile("has changed|asked for again")
            )
            expect(button).to_be_disabled()
            next_request(page, asked).fulfill(json={"plans": [{}]})
            expect(button).to_be_enabled()

        page.route("**/api/plan", lambda route: asked.append(route))
        begin(page)
        parked = workload("SUSPENDED", 1, parked_gpu_uuids=["GPU-0"])
        page.evaluate("tell", {"changes": [parked], "state": {}})
        page.evaluate(OPEN, "Restore")
        button = page.locator('dialog button:text-is("Restore")')
        next_request(page, asked).fulfill(json={"plans": [{"destinations": [{"gpu_uuid": "GPU-0"}]}]})
        expect(page.locator("dialog .move-picture")).to_contain_text("alpha/0")
        expect(button).to_be_enabled()
        change(gpu(0, "LEASED", workload_id="w-2"))
        expect(page.locator("dialog .move-picture")).to_have_count(0)  # the old plan had these GPUs
        change(gpu(1, "FREE", health="LOST"))
        change(gpu(1, "FREE", cordon={"reason": "a fan"}))
        change(["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "STALE"}])
        expect(page.locator("dialog .picture")).to_contain_text("On its former GPUs")
        change(workload("RUNNING", 2, "GPU-2"))
        expect(page.locator("dialog .picture")).to_be_empty()


@pytest.mark.long
def test_an_equal_plan_after_a_loss_of_contact_is_told_as_no_change(
    browser: Browser, web_fleet: WebFleet
) -> None:
    asked: list[Route] = []
    free = itertools.count(100)  # measured anew for each plan
    with open_page(browser, web_fleet.url, web_fleet.token) as page:

        def answer(step: str) -> None:
            check = {"name": "host memory", "result": "PASSED", "detail": f"{next(free)} B available"}
            tier = {"tier": "HOST", "needed_bytes": 9, "available_bytes": next(free)}
            plan = {"steps": [step], "checks": [check], "tiers": [tier]}
            next_request(page, asked).fulfill(json={"plans": [plan]})

        def change(state: str, step: str) -> None:
            worker = {"worker_id": "worker-a", "name": "alpha", "state": state}
            page.evaluate("tell", {"changes": [["worker", "worker-a", worker]], "state": {}})
            expect(told).to_have_text(PLANNED_AGAIN)
            answer(step)

        page.route("**/api/plan", lambda route: asked.append(route))
        begin(page)
        page.evaluate("tell", {"changes": [workload("RUNNING", 1, "GPU-0")], "state": {}})
        page.evaluate(OPEN, "Suspend")
        told = page.locator("dialog footer [role=status]")
        answer("first")
        expect(page.locator('dialog button:text-is("Suspend")')).to_be_focused()
        page.keyboard.press("Shift")
        for state in ("DISCONNECTED", "CONNECTED"):
            change(state, "first")
            expect(told).to_have_text("The dry run is complete.")
        change("STALE", "second")
        expect(told).to_have_text(COMPLETE)


@pytest.mark.long
def test_a_restart_of_the_coordinator_is_no_change_and_keeps_the_safe_repetition(
    browser: Browser, web_fleet: WebFleet
) -> None:
    asked: list[Route] = []
    sent: list[Route] = []
    running = workload("RUNNING", 1, "GPU-0")
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:

        def restart(*, is_unanswered: bool = False) -> None:
            away = ["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "DISCONNECTED"}]
            back = ["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}]
            page.evaluate("tell", {"reset": {}, "changes": [away, running], "state": {"is_loading": True}})
            page.evaluate("() => new Promise(requestAnimationFrame)")
            expect(picture).to_have_text("alpha/0→parked")
            page.evaluate("tell", {"changes": [], "state": {}})  # no worker has reported its GPUs
            next_request(page, asked).fulfill(json={"plans": [{"steps": ["first"]}]})
            expect(picture).to_have_text("alpha/0→parked")
            expect(steps).to_have_text("first")
            if is_unanswered:
                expect(page.locator("dialog .box.bad")).to_have_count(0)
                expect(page.locator("dialog .box.warn")).to_contain_text("“Suspend” again is safe")
            page.evaluate("tell", {"changes": [back, gpu(0), gpu(1)], "state": {}})
            next_request(page, asked).fulfill(json={"plans": [{"steps": ["first"]}]})
            expect(told).to_have_text("The dry run is complete.")
            expect(picture).to_have_text("alpha/0→parked")
            expect(suspend).to_be_enabled()

        page.route("**/api/plan", lambda route: asked.append(route))
        page.route("**/api/action", lambda route: sent.append(route))
        begin(page)
        page.evaluate("tell", {"changes": [running], "state": {}})
        page.evaluate(OPEN, "Suspend")
        picture = page.locator("dialog .move-picture")
        steps = page.locator("dialog .plan .steps li")
        told = page.locator("dialog footer [role=status]")
        suspend = page.locator('dialog button:text-is("Suspend")')
        next_request(page, asked).fulfill(json={"plans": [{"steps": ["first"]}]})
        page.keyboard.press("Shift")
        expect(suspend).to_be_enabled()
        restart()
        suspend.click()
        first = next_request(page, sent)
        first.abort()
        expect(page.locator("dialog .box.bad")).to_contain_text("“Suspend” again is safe")
        page.evaluate("tell", {"changes": [workload("SUSPENDING", 2, "GPU-0")], "state": {}})
        page.wait_for_timeout(400)
        expect(told).to_have_text("")  # no plan is asked for
        assert not asked
        restart(is_unanswered=True)
        suspend.click()
        again = next_request(page, sent)
        assert again.request.post_data_json == first.request.post_data_json
        again.fulfill(status=409, json={"reason": "BUSY", "message": "command c-1 has not ended"})
        expect(page.locator("dialog .box.bad")).to_contain_text("c-1 has not ended")
        expect(page.locator("dialog .box.warn")).to_have_count(0)


@pytest.mark.long
def test_a_dialog_without_a_plan_promises_none_after_a_loss_of_contact(
    browser: Browser, web_fleet: WebFleet
) -> None:
    running = workload("RUNNING", 1, "GPU-0")
    worker = ["worker", "worker-a", {"worker_id": "worker-a", "name": "alpha", "state": "CONNECTED"}]
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/action", lambda route: route.abort())
        begin(page)
        page.evaluate("tell", {"changes": [running], "state": {}})
        page.evaluate(OPEN, "Stop…")
        page.locator("dialog button[type=submit]").click()
        expect(page.locator("dialog .box.bad")).to_contain_text("may have been stored")
        changes = [worker, *(gpu(one) for one in range(3)), running]
        page.evaluate("tell", {"reset": {}, "changes": changes, "state": {}})
        expect(page.locator("dialog .box.warn")).to_contain_text("may have been stored")
        expect(page.locator("dialog footer [role=status]")).to_have_text("")
        expect(page.locator("dialog button[type=submit]")).to_be_enabled()


@pytest.mark.long
def test_the_plan_of_a_move_follows_the_named_gpus_only(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/plan", lambda route: asked.append(route))
        begin(page)
        held = [gpu(0, "LEASED", workload_id="w-1"), workload("RUNNING", 1, "GPU-0")]
        page.evaluate("tell", {"changes": held, "state": {}})
        page.evaluate(OPEN, "Move…")
        page.click(f"{slot(page, 1)}.candidate")
        move = page.locator('dialog button:text-is("Move")')
        next_request(page, asked).fulfill(json={"plans": [{}]})
        expect(move).to_be_enabled()
        page.evaluate("tell", {"changes": [gpu(2, "LEASED", workload_id="w-2")], "state": {}})
        expect(page.locator(slot(page, 2))).to_have_attribute("data-state", "LEASED")
        expect(move).to_be_enabled()
        assert asked == []
        page.evaluate("tell", {"changes": [gpu(1, "LEASED", workload_id="w-2")], "state": {}})
        expect(page.locator("dialog footer [role=status]")).to_have_text(PLANNED_AGAIN)
        expect(move).to_be_disabled()
        next_request(page, asked).fulfill(json={"plans": [{}]})
        expect(move).to_be_enabled()


@pytest.mark.long
def test_a_dialog_that_opens_while_the_view_loads_plans_once_it_is_complete(
    browser: Browser, web_fleet: WebFleet
) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.route("**/api/plan", lambda route: asked.append(route))
        begin(page)
        page.evaluate("tell", {"changes": [workload("RUNNING", 1, "GPU-0")], "state": {"is_loading": True}})
        page.evaluate(OPEN, "Suspend")
        next_request(page, asked).fulfill(json={"plans": [{"steps": ["early"]}]})
        expect(page.locator("dialog .plan .steps li")).to_have_text("early")
        picture = page.locator("dialog .move-picture")
        expect(picture).to_have_text("alpha/0→parked")
        page.evaluate("tell", {"changes": [workload("RUNNING", 2, "GPU-1")], "state": {"is_loading": True}})
        page.evaluate("() => new Promise(requestAnimationFrame)")
        assert asked == []
        expect(picture).to_have_text("alpha/0→parked")
        page.evaluate("tell", {"changes": [], "state": {}})
        expect(picture).to_have_text("alpha/1→parked")
        next_request(page, asked).fulfill(
            json={
                "plans": [{"steps": ["complete"], "estimate": {"duration": 0.6, "basis": "GPU-1: assumed"}}]
            }
        )
        expect(page.locator("dialog .plan .steps li")).to_have_text("complete")
        estimate = page.locator("dialog .plan .estimate")
        expect(estimate).to_have_text("Basis of the estimate: GPU-1: assumed.")
        expect(page.locator('dialog button:text-is("Suspend")')).to_be_enabled()


@pytest.mark.long
def test_a_refused_action_is_planned_again_after_a_change(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    busy = {"reason": "BUSY", "message": "command c-1 has not ended"}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/plan", lambda route: asked.append(route))
        page.route("**/api/action", lambda route: route.fulfill(status=409, json=busy))
        begin(page)
        page.evaluate("tell", {"changes": [workload("RUNNING", 1, "GPU-0")], "state": {}})
        page.evaluate(OPEN, "Suspend")
        suspend = page.locator('dialog button:text-is("Suspend")')
        next_request(page, asked).fulfill(json={"plans": [{"steps": ["first"]}]})
        suspend.click()
        expect(page.locator("dialog .box.bad")).to_contain_text("c-1 has not ended. Ask again")
        page.evaluate("tell", {"changes": [workload("RUNNING", 2, "GPU-0")], "state": {}})
        expect(page.locator("dialog footer [role=status]")).to_have_text(PLANNED_AGAIN)
        next_request(page, asked).fulfill(json={"plans": [{"steps": ["second"]}]})
        expect(page.locator("dialog .plan .steps li")).to_have_text("second")
        expect(page.locator("dialog .box.bad")).to_have_count(0)
        expect(suspend).to_be_enabled()
        expect(page.locator("dialog .body")).to_be_focused()


@pytest.mark.long
def test_a_dialog_tells_that_a_workload_of_its_plan_has_ended_or_was_deleted(
    browser: Browser, fleet: WebFleet
) -> None:
    fleet.fleet.run_counter("other")
    with open_page(browser, fleet.url, fleet.token, Complaints()) as page:
        page.click(slot(page, 0))
        page.click('.drawer button:text-is("Swap…")')
        page.click(f"{slot(page, 1)}.candidate")
        steps = page.locator("dialog .move-picture > span")
        expect(steps).to_have_text(["train: alpha/0→alpha/1", "other: alpha/1→alpha/0"])
        swap = page.locator('dialog button:text-is("Swap")')
        expect(swap).to_be_enabled()
        fleet.fleet.cli("stop", "other")
        expect(page.locator("dialog .box.bad")).to_contain_text("workload other is EXITED")
        expect(steps).to_have_text(["train: alpha/0→alpha/1"])
        expect(swap).to_be_disabled()
        page.keyboard.press("Escape")
        page.goto(f"{fleet.url}workloads/train")
        page.click('button:text-is("Suspend")')
        suspend = page.locator('dialog button:text-is("Suspend")')
        expect(suspend).to_be_enabled()
        fleet.fleet.cli("stop", "train")
        expect(page.locator("dialog .box.bad")).to_contain_text("EXITED")
        expect(suspend).to_be_disabled()
        fleet.fleet.cli("rm", "workload", "train")
        expect(page.locator("dialog .box.bad")).to_contain_text("no workload has the id or name 'train'")
        expect(suspend).to_be_disabled()
