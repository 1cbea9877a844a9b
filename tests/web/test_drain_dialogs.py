"""The dialogs of drains, and of the uncordon after them."""

import json
import re
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from .browsers import SCRIPTED_STREAM, Complaints, next_request, open_page, slot
from .conftest import WebFleet
from .dialog_scripts import DRAIN, SUSPEND


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


UNCORDON: Final = """async ([worker, uuids]) => {
  const { gpuActions, workerActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  document.querySelector("dialog")?.close();
  const actions = uuids ? gpuActions(live.gpus.get(uuids)) : workerActions(live.workers.get(worker));
  actions.find((one) => one.textContent === "Uncordon").click();
}"""


CORDON: Final = """async (worker) => {
  const { workerActions } = await import("/static/actions.js");
  const { live } = await import("/static/live.js");
  workerActions(live.workers.get(worker)).find((one) => one.textContent === "Cordon…").click();
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
        unhealthy = (
            "Unhealthy GPUs get no new lease until their repair and a reset: alpha/2 (double bit ecc). "
            "After the repair: leasehold gpu reset-health alpha/2"
        )
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
        confirm = page.locator('dialog button:text-is("Uncordon")')
        expect(confirm).to_be_focused()
        tell()
        expect(steps).to_have_text([again])
        expect(page.locator("dialog footer")).to_contain_text("What will happen has changed.")
        expect(confirm).not_to_be_focused()
        tell(cordon=fan)
        page.keyboard.press("Escape")
        page.click(slot(page, 0))
        expect(page.locator(".drawer h2")).to_have_text("alpha/0")
        expect(button).to_have_count(0)  # it shows the cordon of its host
        page.evaluate(UNCORDON, ["worker-a", None])
        own = "GPUs with a cordon of their own stay cordoned: alpha/1, alpha/2."
        expect(steps).to_have_text([again, own, unhealthy])
        tell()
        expect(steps).to_have_text(["It is not cordoned any more: there is nothing to do."])
        page.keyboard.press("Escape")
        page.evaluate(CORDON, "worker-a")
        expect(steps).to_have_count(2)
        tell(cordon={**fan, "cordoned_by": "user/carol"})
        expect(steps).to_contain_text(
            ["It is cordoned already by user/carol: the reason “a fan” is replaced."]
        )


ORDER: Final = """async () => {
  const { plansOfDrain } = await import("/static/drain.js");
  const { live } = await import("/static/live.js");
  while (live.isLoading) await new Promise((done) => setTimeout(done, 20)); // the stream replaces the view
  const status = { state: "RUNNING", lease: { gpu_uuids: ["GPU-1"] } };
  for (const at of [3, 1, 2]) {
    live.workloads.set(`w-${at}`, { workload_id: `w-${at}`, name: `n-${at}`, create_time: at, status });
  }
  live.workloadsOf.set("worker-a", ["w-3", "w-1", "w-2"]);
  return plansOfDrain({ worker_id: "worker-a" }).map((one) => one.name);
}"""


@pytest.mark.long
def test_the_plans_of_a_drain_are_in_the_order_of_its_suspends(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(ORDER) == ["n-1", "n-2", "n-3"]
