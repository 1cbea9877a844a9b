"""The page in a real browser: what it shows, that it follows, each action, roles, and its accessibility."""

import contextlib
import json
import re
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.coordinator.issuer import AUDIENCE, ISSUER, key_set, new_keys, sign
from tests.integration.fleets import COUNTER, make_fleet
from tests.ports import free_port

from .browsers import SCRIPTED_STREAM, Complaints, expect_state, open_page, slot
from .conftest import WebFleet

AXE: Final = Path(__file__).resolve().parents[2] / ".cache/axe/node_modules/axe-core/axe.min.js"
PHONE: Final = {"width": 390, "height": 844}

LONG: Final = "the-workload-with-a-rather-long-name-of-fifty-letters"
VIEWS: Final = ("/", "/timeline", "/workloads", "/commands")


def state(page: Page, number: int) -> str | None:
    """The state of a GPU of alpha, as the page shows it."""
    return page.get_attribute(slot(page, number), "data-state")


def act(page: Page, gpu: int, button: str, *picked: int, verb: str = "") -> None:
    """Opens a GPU, presses a button, picks GPUs, and confirms after the dry run."""
    if page.locator(".drawer").count() == 0 or not page.locator(f"{slot(page, gpu)}.chosen").count():
        page.click(slot(page, gpu))
    page.click(f'.drawer button:text-is("{button}")')
    for one in picked:
        page.click(f"{slot(page, one)}.candidate")
    confirm(page, verb or button.removesuffix("…"))


def confirm(page: Page, verb: str) -> None:
    """Confirms the open dialog once its plan is there, and waits for the end of its command."""
    page.click(f'dialog button:text-is("{verb}"):enabled')
    expect(page.locator("dialog .command .badge").first).to_have_text("succeeded")
    page.click('dialog button:text-is("Close")')


@pytest.mark.long
def test_the_fleet_is_live_and_each_action_on_a_workload_is_done(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        expect_state(page, 0, "LEASED")
        expect(page.locator(slot(page, 0))).to_contain_text("train")
        fleet.fleet.run_counter("other", gpus=1)  # a change from elsewhere
        expect_state(page, 1, "LEASED")

        act(page, 0, "Move…", 2)
        expect_state(page, 2, "LEASED")
        expect_state(page, 0, "FREE")
        assert fleet.fleet.leases() == {"alpha/1": "other", "alpha/2": "train"}

        act(page, 1, "Swap…", 2, verb="Swap")
        assert fleet.fleet.leases() == {"alpha/2": "other", "alpha/1": "train"}

        act(page, 1, "Suspend")
        parked = page.locator(".parked a", has_text="train")
        expect(parked).to_contain_text("MiB · host")
        page.fill('input[type="search"]', "parked")
        expect(parked).to_be_visible()
        page.fill('input[type="search"]', "")
        expect_state(page, 1, "FREE")

        parked.click()
        expect(page.locator("h1")).to_contain_text("train")
        page.click('button:text-is("Restore on…")')
        page.click(f"{slot(page, 3)}.candidate")
        confirm(page, "Restore")
        expect_state(page, 3, "LEASED")
        assert fleet.fleet.leases()["alpha/3"] == "train"

        act(page, 2, "Stop…", verb="Stop")
        expect_state(page, 2, "FREE")
    fleet.fleet.wait_counting("train")


WITH_NAMES: Final = """async (text) => (await import("/static/live.js")).withNames(text)"""


@pytest.mark.long
def test_a_dry_run_shows_a_refusal_and_forbids_the_action(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.run_counter("greedy", gpus=4)
    train = fleet.fleet.client.workload("train").workload_id
    gpu = next(one.gpu.uuid for one in fleet.fleet.client.gpus() if one.gpu.slot == 2)
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click('.parked a:has-text("train")')
        expect(page.get_by_label("Specification")).to_contain_text("retain+cuda_suspend")
        badges = page.get_by_label("Commands").locator(".badge")
        expect(badges).to_have_text(["nothing to do", "succeeded", "succeeded"])
        assert (
            page.evaluate(WITH_NAMES, f"{gpu} of {train}, not of GPU-1") == "alpha/2 of train, not of GPU-1"
        )
        page.click('button:text-is("Restore")')
        expect(page.locator("dialog .box.bad")).to_contain_text("This would be refused")
        expect(page.locator('dialog button:text-is("Restore")')).to_be_disabled()
        page.keyboard.press("Escape")
        expect(page.locator("dialog")).to_have_count(0)
        assert "alpha/0" in fleet.fleet.leases()
        page.click('button:text-is("Restore on…")')
        expect(page.locator(".pick-bar")).to_contain_text("Too few qualify now (0)")
        fleet.fleet.cli("stop", "greedy")
        expect(page.locator(".pick-bar")).not_to_contain_text("Too few")
        fleet.fleet.cli("restore", "train")
        expect(page.locator(".notice")).to_contain_text("train is not parked any more")
        expect(page.locator(".pick-bar")).to_have_count(0)


@pytest.mark.long
def test_actions_on_hosts_and_commands(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Cordon…")')
        page.click('dialog button:text-is("Cordon")')  # refused by the form: no reason
        page.fill("dialog #reason", "replaces a fan")
        confirm(page, "Cordon")
        expect_state(page, 3, "CORDONED")
        expect(page.locator(".drawer")).to_contain_text("replaces a fan")
        page.goto(f"{fleet.url}commands")
        cordon = page.locator(".command", has_text="cordon")
        expect(cordon.locator('a[href^="/workers/"]')).to_have_text("alpha/3")
        expect(cordon).to_contain_text("replaces a fan")
        page.goto(fleet.url)
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Uncordon")')
        confirm(page, "Uncordon")
        expect_state(page, 3, "FREE")
        page.click('.host-name a:has-text("alpha")')
        expect(page.locator(".capabilities")).to_contain_text("cuda suspend")
        page.click('button:text-is("Drain…")')
        expect(page.locator("dialog .plan")).to_be_visible()
        page.fill("dialog #reason", "maintenance")
        page.click('dialog button:text-is("Drain"):enabled')
        expect(page.locator("dialog .badge", has_text="succeeded")).to_have_count(2)
        page.click('dialog button:text-is("Close")')
        expect(page.locator(".title-line")).to_contain_text("cordoned: maintenance")
        assert fleet.fleet.leases() == {}
        page.click('button:text-is("Uncordon")')
        confirm(page, "Uncordon")
        # A command that waits for its worker can be cancelled.
        fleet.fleet.processes["alpha"].send_signal(signal.SIGSTOP)
        try:
            fleet.fleet.cli("restore", "train", "--no-wait")
            page.click('nav a:text-is("Commands")')
            page.click('.command button:text-is("Cancel…")')
            page.click('dialog button:text-is("Cancel the command")')
            expect(page.locator("dialog")).to_contain_text("The cancellation was requested, and waits")
            expect(page.locator("dialog footer")).to_have_text("Close")
            page.reload()
            restore = page.locator(".command", has_text="restore").first
            expect(restore).to_contain_text("cancellation requested")
            expect(restore.locator("button")).to_have_count(0)
        finally:
            fleet.fleet.processes["alpha"].send_signal(signal.SIGCONT)
        expect(restore.locator(".badge").first).to_have_text(re.compile("cancelled|succeeded"))
        expect(restore).not_to_contain_text("requested")


@pytest.mark.long
def test_the_page_survives_a_restart_of_the_coordinator(browser: Browser, fleet: WebFleet) -> None:
    complaints = Complaints()  # a browser complains of a server that is away
    with open_page(browser, fleet.url, fleet.token, complaints) as page:
        expect_state(page, 0, "LEASED")
        fleet.fleet.end("coordinator", signal.SIGTERM)
        expect(page.locator("#contact")).to_contain_text("No contact since")
        assert state(page, 0) == "LEASED"  # the last known state stays
        page.click('nav a:text-is("Commands")')  # whose script was not loaded yet
        expect(page.locator("main .box.bad")).to_contain_text("this view (Commands) can't be shown")
        fleet.fleet.start_coordinator()
        expect(page.locator("#contact")).to_be_empty()
        expect(page.locator("h1")).to_have_text("Commands")
        page.click('nav a:text-is("Fleet")')
        fleet.fleet.wait(lambda: fleet.fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
        fleet.fleet.cli("suspend", "train")
        expect_state(page, 0, "FREE")
        page.click('nav a:text-is("Timeline")')
        page.click('button:text-is("Table")')
        rows = page.locator("tbody tr", has_text="train")
        expect(rows.first).to_contain_text("alpha/0")  # the history has the time before the restart
    assert all("Failed to load resource" in line or "ERR_" in line for line in complaints.lines)


@pytest.mark.long
def test_a_view_whose_script_fails_reloads_once_and_only_if_the_server_answers(
    browser: Browser, web_fleet: WebFleet
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        loads: list[str] = []
        page.on("load", lambda loaded: loads.append(loaded.url))
        expect(page.locator("#contact")).to_be_empty()
        page.route("**/static/commands.js", lambda route: route.abort())
        page.route("**/api/session", lambda route: route.abort())
        with page.expect_request("**/api/session"):
            page.click('nav a:text-is("Commands")')
        expect(page.locator("main .box.bad")).to_contain_text("It appears once the server answers")
        page.wait_for_timeout(500)
        assert loads == []
        page.unroute("**/api/session")
        expect(page.locator("main .box.bad")).to_contain_text("its script fails to load")
        page.wait_for_timeout(2_500)
        assert loads == [f"{web_fleet.url}commands"]
        page.unroute("**/static/commands.js")
        page.reload()
        expect(page.locator("h1")).to_have_text("Commands")
        assert page.evaluate("sessionStorage.length") == 0


@pytest.mark.long
def test_a_move_can_be_followed_on_the_timeline(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("remap", "train", "--to", "alpha/2")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click('nav a:text-is("Timeline")')
        canvas = page.locator("canvas[role=application]")
        canvas.focus()
        tip = page.locator(".tip")

        def shows_a_span() -> bool:  # once the history is there
            page.keyboard.press("ArrowDown")
            page.wait_for_timeout(100)
            return "train" in (tip.text_content() or "")

        fleet.fleet.wait(shows_a_span)
        for key in ("+", "-", "ArrowLeft", "n"):
            page.keyboard.press(key)
        page.keyboard.press("Enter")
        expect(page.locator("h1")).to_contain_text("train")
        expect(page.locator(".mini table tbody tr")).not_to_have_count(0)
        expect(page.locator(".command b", has_text="move")).to_be_visible()
        expect(page.locator(".output")).to_contain_text("count=")


@pytest.mark.long
def test_pointers_move_zoom_and_open_on_the_timeline(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token, has_touch=True) as page:
        page.goto(f"{fleet.url}timeline?range=3600000")
        pressed = page.locator('.segments [aria-pressed="true"]')
        expect(pressed).to_have_text("1 h")
        canvas = page.locator("canvas[role=application]")
        place = canvas.bounding_box()
        assert place is not None
        middle = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
        page.mouse.move(*middle)
        page.keyboard.down("Control")
        page.mouse.wheel(0, 100)
        page.keyboard.up("Control")
        expect(pressed).to_have_count(0)  # between two of the ranges
        page.mouse.down()
        page.mouse.move(middle[0] + 80, middle[1], steps=4)
        page.mouse.up()
        expect(page.locator('button:text-is("Follow now")')).to_be_visible()

        page.goto(f"{fleet.url}timeline?range=60000")
        tip = page.locator(".tip b")
        # The row of alpha/0 is below axis, commands and the name of its host. Now is 2 % before the end.
        now = place["x"] + 0.98 * place["width"] - 8, place["y"] + 125

        def shows_the_span() -> bool:  # once the history is there
            page.mouse.move(now[0], now[1] + 300)
            page.mouse.move(*now)
            return tip.is_visible() and tip.text_content() == "train"

        fleet.fleet.wait(shows_the_span)
        page.mouse.move(now[0], now[1] + 300)
        expect(tip).to_be_hidden()
        page.touchscreen.tap(*now)
        expect(tip).to_have_text("train")
        page.wait_for_timeout(1_500)  # the text of a span that goes on changes each second
        assert page.url.endswith("/timeline?range=60000")
        page.touchscreen.tap(*now)
        expect(page.locator("h1")).to_contain_text("train")


@pytest.mark.long
def test_the_drawer_marks_what_a_host_out_of_contact_reported_last(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 0))
        facts = page.locator(".drawer dl")
        expect(facts).to_have_count(2)
        expect(facts.first).not_to_contain_text("last known")
        other = page.context.new_page()
        fleet.fleet.processes["alpha"].send_signal(signal.SIGSTOP)
        try:
            other.goto(f"{fleet.url}workloads/train")
            # The silent worker delays its own answer only.
            expect(other.locator("h1")).to_contain_text("train", timeout=5_000)
            checkpoints = other.get_by_label("Checkpoints")
            expect(checkpoints).to_contain_text("Asking its worker")
            expect(facts.nth(0)).to_contain_text("leased (last known)")
            expect(page.locator(f"{slot(page, 1)}.last-known")).to_have_attribute(
                "aria-label", re.compile("last known")
            )
            expect(page.locator(".counts")).to_contain_text("4out of contact")
            expect(page.locator(".counts")).to_contain_text("0free")
            expect(facts.nth(1)).to_contain_text("running and ready (last known)")
            expect(page.locator(".host-name")).to_contain_text("3 of 4 free (last known)")
            other.goto(f"{fleet.url}workers/alpha")
            cards = [other.get_by_label(card, exact=True) for card in ("Resources", "GPUs", "Workloads")]
            for card, told in zip(cards, ("3 of 4 +free", "leased", "running and ready"), strict=True):
                expect(card).to_contain_text(re.compile(rf"{told} +\(last known\)"))
        finally:
            fleet.fleet.processes["alpha"].send_signal(signal.SIGCONT)
        expect(facts.first).not_to_contain_text("last known")
        for card in cards:
            expect(card).not_to_contain_text("last known")
        other.goto(f"{fleet.url}workloads/train")
        expect(checkpoints).to_contain_text("No checkpoint")


RUNNING_AFTER_A_FAILED_HOOK: Final = """async () => {
  const { workloadActions } = await import("/static/actions.js");
  const status = { state: "RUNNING", error: { reason: "HOOK_FAILED" }, lease: { gpu_uuids: ["GPU-1"] } };
  return workloadActions({ workload_id: "w-1", name: "one", status }).map((one) => one.textContent);
}"""


@pytest.mark.long
def test_checkpoints_are_asked_for_again_and_hidden_from_those_without_permission_only(
    browser: Browser, fleet: WebFleet
) -> None:
    def refusal(reason: str, message: str) -> dict[str, str]:
        return {"reason": reason, "message": message}

    answers: list[tuple[int, object]] = [
        (503, refusal("", "the coordinator does not answer")),
        (429, refusal("TOO_MANY_CALLS", "too many calls")),
        (200, {"checkpoints": [], "unreachable": []}),
        (404, refusal("UNKNOWN_WORKER", "no worker has this name")),
        (200, {"refusal": refusal("NOT_PERMITTED", "not permitted")}),
    ]

    def tell(route: Route) -> None:
        status, document = answers.pop(0)
        route.fulfill(status=status, json=document)

    with open_page(browser, fleet.url, fleet.token, Complaints()) as page:
        page.route("**/checkpoints", tell)
        page.goto(f"{fleet.url}workloads/train")
        card = page.locator('[aria-label="Checkpoints"]')
        expect(card).to_contain_text("not known: the coordinator does not answer")
        expect(card).to_contain_text("not known: too many calls")
        expect(card).to_contain_text("No checkpoint on the disk of its worker")
        page.reload()
        expect(card).to_contain_text("not known: no worker has this name")
        page.reload()
        expect(page.locator("h1")).to_contain_text("train")
        expect(card).to_be_hidden()
    assert answers == []


GAP: Final = """async () => {
  (await import("/static/live.js")).live.isConnected = false;
  dispatchEvent(new Event("online"));
}"""
"""Lets the live view connect anew, after which a page of a workload asks for everything again."""


@pytest.mark.long
def test_an_older_list_of_checkpoints_replaces_no_newer_one(browser: Browser, fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, fleet.url, fleet.token) as page:
        page.route("**/checkpoints", lambda route: asked.append(route))
        page.goto(f"{fleet.url}workloads/train")
        expect(page.locator("h1 + .badge")).to_contain_text("ready")
        while len(asked) < 1:
            page.wait_for_timeout(50)
        page.evaluate(GAP)
        while len(asked) < 2:
            page.wait_for_timeout(50)
        old, new = asked
        card = page.locator('[aria-label="Checkpoints"]')
        new.fulfill(json={"checkpoints": [], "unreachable": []})
        expect(card).to_contain_text("No checkpoint on the disk")
        with page.expect_event("requestfinished"):
            old.fulfill(json={"checkpoints": [], "unreachable": ["worker-1"]})
        page.evaluate("new Promise((resolve) => setTimeout(resolve, 100))")
        expect(card).to_contain_text("No checkpoint on the disk")


@pytest.mark.long
def test_an_unknown_workload_and_its_failed_rollback_are_shown_and_it_is_restored(
    browser: Browser, web_fleet: WebFleet
) -> None:
    fleet = web_fleet.fleet
    host = fleet.start_worker("alpha", settings="driver_call_floor_s = 3\n")
    fleet.run_counter("train")
    pid = fleet.client.workload("train").status.root_pid
    host.set_fault("checkpoint", pid, hang=True)
    host.set_fault("get_state", pid, hang=True, after=2)
    fleet.cli("suspend", "train", code=1)
    host.clear_faults()
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        tile = page.locator(slot(page, 0))
        expect(tile).to_contain_text("unknown")
        expect(tile.locator(".g-UNKNOWN").first).to_be_visible()
        expect(tile).to_have_attribute("aria-label", re.compile("workload train unknown"))
        page.goto(f"{web_fleet.url}workloads/train")
        failed = page.locator(".command", has_text="suspend")
        expect(failed.get_by_label("Processes")).to_have_text(
            re.compile(rf"^pid {pid}: running → unknown, NOT rolled back")
        )
        expect(failed).not_to_contain_text("(rollback)")
        assert "Wake" in page.evaluate(RUNNING_AFTER_A_FAILED_HOOK)
        page.click('button:text-is("Restore")')
        expect(page.locator("dialog")).to_contain_text("Examines each process again")
        confirm(page, "Restore")
        expect(page.locator(".title-line .badge")).to_contain_text("running")
    fleet.wait_counting("train")


@pytest.mark.long
def test_a_wedged_workload_without_gpus_stands_beside_its_host(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("suspend", "train")
    pid = fleet.fleet.client.workload("train").status.root_pid
    fleet.fleet.hosts["alpha"].set_fault("restore", pid, error=2, times=1)
    fleet.fleet.cli("restore", "train", code=1)
    fleet.fleet.wait(lambda: fleet.fleet.leases() == {})
    with open_page(browser, fleet.url, fleet.token) as page:
        beside = page.locator(".host .parked a")
        expect(beside).to_have_text("trainwedged")
        expect(beside).to_have_attribute("title", "train: wedged")
        expect(page.locator(".counts")).to_contain_text("0parked")
        beside.click()
        expect(page.locator("h1 + .badge")).to_have_text("wedged")


@pytest.mark.long
def test_a_running_workload_that_is_not_ready_is_told_so(browser: Browser, web_fleet: WebFleet) -> None:
    web_fleet.fleet.start_worker("alpha")
    web_fleet.fleet.cli("run", "--name", "train", "--gpus", "1", "--", "sleep", "600")  # it never uses CUDA
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.click(slot(page, 0))
        expect(page.locator(".drawer")).to_contain_text("Staterunning, not ready")
        page.goto(f"{web_fleet.url}workloads")
        expect(page.locator("tbody tr")).to_contain_text("running, not ready")
        page.click('a:text-is("train")')
        expect(page.locator("h1 + .badge")).to_have_text("running, not ready")
        page.goto(f"{web_fleet.url}plain/workloads")
        expect(page.locator("tbody tr")).to_contain_text("RUNNING (not ready)")


@pytest.mark.long
def test_a_workload_whose_hooks_failed_is_told_so(
    browser: Browser, web_fleet: WebFleet, tmp_path: Path
) -> None:
    """A hook refuses the suspend, and another one refuses its rollback."""
    hooks = [
        {"name": "back", "phase": "AFTER_RESTORE", "command": {"arguments": ["false"]}},
        {"name": "refused", "phase": "BEFORE_SUSPEND", "command": {"arguments": ["false"]}},
    ]
    file = tmp_path / "hooks.json"
    file.write_text(json.dumps(hooks))
    web_fleet.fleet.start_worker("alpha")
    counter = [sys.executable, str(COUNTER), "--bytes", "1MiB", "--interval-s", "0.02"]
    web_fleet.fleet.cli("run", "--name", "train", "--gpus", "1", "--hooks", str(file), "--", *counter)
    web_fleet.fleet.cli("suspend", "train", code=1)
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.goto(f"{web_fleet.url}workloads/train")
        expect(page.locator("h1 + .badge")).to_have_text("running, hook failed")
        page.goto(f"{web_fleet.url}plain/workloads")
        expect(page.locator("tbody tr")).to_contain_text("RUNNING (HOOK_FAILED)")


@pytest.mark.long
def test_a_cordoned_host_counts_all_its_gpus(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("cordon", "alpha", "--reason", "a fan")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(".host-name a")
        gpus = page.locator(".resource", has_text="GPUs")
        expect(gpus).to_contain_text(re.compile("0 of 4 *free"))


LIMITS: Final = """async () => {
  const { planView } = await import("/static/plan_view.js");
  const tier = (name, available) => ({ tier: name, needed_bytes: 1024, available_bytes: available });
  return [[tier("HOST"), tier("DEVICE")], [tier("HOST", 2048), tier("DEVICE")]].map(
    (tiers) => [...planView({ tiers }).querySelectorAll("th, td")].map((one) => one.textContent).join(" "));
}"""


@pytest.mark.long
def test_a_plan_without_limits_has_no_column_for_them(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(LIMITS) == [
            "Tier Needed host 1.0 KiB device 1.0 KiB",
            "Tier Needed Available host 1.0 KiB 2.0 KiB device 1.0 KiB \N{EN DASH}",
        ]


JOINTS = """async () => {
  const { jointsOf } = await import("/static/spans.js");
  const span = (workload, gpu, begin, end, lease) => ({
    workload_id: workload, gpu_uuid: gpu, slot: Number(gpu), state: "LEASED", lease_id: lease,
    begin_time: begin,
    ...(end ? { end_time: end } : {}),
  });
  const parked = (...fields) => ({ ...span(...fields), state: "UNSPECIFIED", parked: true });
  const spans = [
    span("moved", "0", 0, 10000, "a"), span("moved", "3", 10000, 0, "b"),
    span("parked", "1", 0, 5000, "c"), parked("parked", "1", 5010, 60000),
    span("parked", "2", 60000, 70000, "d"), parked("parked", "2", 70010, 0),
    span("pair", "4", 0, 9000, "e"), span("pair", "5", 0, 9000, "e"),
    span("pair", "6", 9001, 0, "f"), span("pair", "7", 9001, 0, "f"),
    span("short", "9", 0, 5000, "h"), span("short", "10", 5300, 0, "i"),
    span("half", "11", 0, 5000, "j"), span("half", "12", 0, 5000, "j"),
    span("half", "10", 5000, 0, "k"), span("half", "11", 5000, 0, "k"),
    span("ended", "8", 0, 5000, "g"),
    span("crossed", "20", 0, 9000, "l"), span("crossed", "21", 0, 9000, "l"),
    span("crossed", "22", 9000, 20000, "m"), span("crossed", "23", 9000, 20000, "m"),
    span("crossed", "22", 20000, 30000, "n"), span("crossed", "23", 20000, 30000, "n"),
    span("crossed", "20", 60000, 0, "o"), span("crossed", "21", 60000, 0, "o"),
    span("swapped", "24", 0, 9000, "p"), span("swapped", "25", 0, 9000, "p"),
    span("swapped", "26", 9000, 0, "q"), span("swapped", "27", 9000, 0, "q"),
    span("stopped", "28", 0, 5000, "r"), parked("stopped", "28", 5001, 60500),
    parked("inside", "30", 5000, 90000), parked("inside", "31", 5000, 90000),
    parked("back", "32", 5000, 60000), span("back", "33", 60000, 0, "s"),
    span("short park", "34", 0, 5000, "t"), parked("short park", "34", 5000, 5010),
    span("short park", "35", 5010, 9000, "u"), span("short park", "36", 9000, 0, "v"),
    span("outage", "37", 0, 5000, "w"), parked("outage", "37", 5001, 60000),
    span("outage", "38", 58500, 0, "x"),
  ];
  const command = (create_time, end_time, operation, pairs) => ({
    state: "SUCCEEDED", create_time, end_time, ...operation,
    result: { applied_pairs: pairs.map(([old_uuid, new_uuid]) => ({ old_uuid, new_uuid })) },
  });
  const remap = (...ids) => ({ operation: { remap: { moves: ids.map((id) => ({ workload_id: id })) } } });
  const moved = command(8000, 9500, remap("crossed"), [["20", "23"], ["21", "22"]]);
  const commands = [
    { ...moved, state: "FAILED", result: { applied_pairs: [{ old_uuid: "20", new_uuid: "22" }] } },
    moved,
    command(19000, 19500, remap("crossed"), [["22", "23"], ["23", "22"]]),
    command(59000, 61000, { workload_id: "crossed", operation: { restore: {} } },
      [["22", "21"], ["23", "20"]]),
    command(8000, 9500, remap("other", "swapped"),
      [["26", "25"], ["27", "24"], ["24", "27"], ["25", "26"]]),
    command(30000, 31000, remap("pair"), [["4", "7"], ["5", "6"]]),
    // A command of others has no pairs.
    { ...command(8000, undefined, remap("pair"), []), result: { claimed_gpu_uuids: ["6", "7"] } },
  ];
  return jointsOf(spans, commands).map((one) => [
    one.workload, one.kind, one.from.gpu_uuid,
    one.to ? one.to.gpu_uuid : one.end === Infinity ? "now" : one.end,
    ...(one.isGuess ? ["guess"] : [])].join(" "));
}"""


@pytest.mark.long
def test_joints_lead_from_where_a_workload_was_to_where_it_is(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(JOINTS) == [
            "moved move 0 3",
            "parked parked 1 2",
            "parked parked 2 now",
            "pair move 4 6 guess",
            "pair move 5 7 guess",
            "short parked 9 10",  # suspended and restored within 0.3 s
            "half move 12 10 guess",  # or 11 to 10, and 12 to 11
            "crossed move 20 23",
            "crossed move 21 22",
            "crossed move 22 23",
            "crossed move 23 22",
            "crossed parked 22 21",
            "crossed parked 23 20",
            "swapped move 24 27",
            "swapped move 25 26",
            "stopped parked 28 60500",
            "inside parked 30 90000",
            "inside parked 31 90000",
            "back parked 32 33",
            "short park parked 34 35",
            "short park move 35 36",
            "outage parked 37 38",
        ]


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
def test_a_click_outlives_a_change_between_press_and_release(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click('nav a:text-is("Workloads")')
        link = page.locator("tbody a").first
        link.hover()
        page.mouse.down()
        page.evaluate("document.querySelector('tbody tr').dataset.former = ''")
        fleet.fleet.cli("cordon", "alpha/3", "--reason", "a fan")
        expect(page.locator("tbody tr").first).not_to_have_attribute("data-former", "")
        page.mouse.up()
        expect(page.locator("h1")).to_have_text("train")
        page.go_back()
        expect(page.locator("h1")).to_have_text("Workloads")  # one click, one step


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


@contextlib.contextmanager
def fleet_of_an_issuer(folder: Path) -> Iterator[tuple[WebFleet, dict[str, str]]]:
    """A fleet with users of an OpenID Connect issuer, and a token of each role. A newcomer has none."""
    keys = new_keys()
    jwks = folder / "jwks.json"
    jwks.write_bytes(key_set(keys))
    settings = folder / "coordinator.toml"
    settings.write_text(
        f'oidc_listen = "127.0.0.1:0"\n[oidc]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'
        f'jwks_file = "{jwks}"\nname_claim = "email"\nrole_claim = "groups"\n'
        'roles = { viewers = "viewer", users = "user", operators = "operator" }\n'
    )
    algorithm, key = keys["es"]
    tokens = {
        role: sign(key, algorithm, "es", email=f"{role}@example.com", groups=[f"{role}s"])
        for role in ("viewer", "user", "operator", "newcomer")
    }
    address = f"127.0.0.1:{free_port()}"
    with make_fleet(folder, "--web", address, "--config", str(settings)) as fleet:
        yield WebFleet(fleet, f"http://{address}/"), tokens


@pytest.mark.long
def test_a_role_sees_its_own_buttons_and_the_server_refuses_the_others(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        fleet.fleet.run_counter("train")
        for role, sees in (("viewer", False), ("user", False), ("operator", True)):
            complaints = Complaints()
            with open_page(browser, fleet.url, tokens[role], complaints) as page:
                expect(page.locator("#who")).to_contain_text(f"oidc-{role}@example.com · {role}")
                expect_state(page, 0, "LEASED")
                page.click(slot(page, 0))
                expect(page.locator(".drawer")).to_contain_text("train")
                for button in ("Suspend", "Cordon…"):
                    assert page.locator(f'.drawer button:text-is("{button}")').count() == int(sees)
                answer = page.evaluate(
                    """async () => (await fetch("/api/action", {method: "POST", headers: {
                    "Leasehold-Page": "1", "Content-Type": "application/json"},
                    body: JSON.stringify({action: "suspend", workload: "train"})})).status"""
                )
                assert answer == (200 if sees else 403)
                page.goto(f"{fleet.url}workloads")
                page.click('a:text-is("train")')
                expect(page.locator("h1")).to_contain_text("train")
                assert (page.locator(".output").count() == 1) is sees
            assert [line for line in complaints.lines if "403" not in line] == []


@pytest.mark.long
def test_what_a_viewer_may_not_see_is_unknown_and_not_zero(browser: Browser, tmp_path: Path) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        for name in ("parked", "train"):
            fleet.fleet.run_counter(name)
        fleet.fleet.cli("suspend", "parked")
        with open_page(browser, fleet.url, tokens["viewer"], Complaints()) as page:
            expect(page.locator(".counts")).to_contain_text("1parked, size unknown")
            page.click('.parked a:has-text("parked")')
            expect(page.locator(".facts").first).to_contain_text("Parkedsize unknown in host memoryHost")
            page.goto(f"{fleet.url}workloads")
            page.click('a:text-is("train")')
            expect(page.locator(".facts").first).to_contain_text("Ready since")
        with open_page(browser, fleet.url, fleet.token) as page:
            expect(page.locator(".counts")).to_contain_text(re.compile(r"1parked, [\d.]+ [KM]iB"))
            page.goto(f"{fleet.url}workloads")
            page.click('a:text-is("train")')
            expect(page.locator(".facts").first).to_contain_text(re.compile(r"Ready after[\d.]+ m?s"))


PARKED_SIZES: Final = """async () => {
  const { parkedAt, parkedSize, parkedText } = await import("/static/words.js");
  const of = (state, status) => ({ status: { state, ...status } });
  const all = [
    of("SUSPENDED", { park_time: 1, parked_bytes: 1024 }), of("STOPPED", { park_time: 1 }), of("STOPPED", {}),
    of("SLEEPING", { park_time: 1, parked_by: {}, parked_bytes: 0 }), of("SLEEPING", {}),
    of("CHECKPOINTED", {}),
  ];
  const asleep = (weights, size) =>
    of("SLEEPING", { parked_by: { weight_strategy: weights }, parked_bytes: size });
  return [
    all.map((one) => parkedAt(one)).map(({ tier, size }) => `${tier}: ${size}`),
    parkedSize(all), parkedSize(all.slice(0, 2)), parkedSize(all.slice(2)), parkedSize([]),
    [asleep("RETAIN", 0), asleep("OFFLOAD", 2048), asleep("DISCARD", 0), all[1]].map(parkedText),
  ];
}"""

DIALOG_OF_A_PARKED_ONE: Final = """async (status) => {
  const { workloadActions } = await import("/static/actions.js");
  const buttons = workloadActions({ workload_id: "w-1", name: "one", status });
  buttons.find((one) => one.textContent === "Restore").click();
  return buttons.map((one) => one.textContent);
}"""


@pytest.mark.long
def test_a_parked_workload_is_where_its_policy_left_it_and_no_unknown_size_is_zero(
    browser: Browser, web_fleet: WebFleet
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(PARKED_SIZES) == [
            [
                "host memory: 1024",
                "disk: 0",
                "disk: undefined",
                "device memory: undefined",
                ": undefined",
                "disk: undefined",
            ],
            "1.0 KiB and 4 of unknown size",
            "1.0 KiB",
            "size unknown",
            "0 B",
            ["in device memory", "2.0 KiB in host memory", "weights discarded", "0 B on disk"],
        ]
        expect(page.locator("#who")).to_contain_text("admin")
        page.route("**/api/plan", lambda route: route.fulfill(json={"plans": [{}]}))
        sleeper = {"state": "SLEEPING", "parked_gpu_uuids": ["GPU-1"], "parked_by": {}, "parked_bytes": 0}
        assert page.evaluate(DIALOG_OF_A_PARKED_ONE, sleeper) == ["Restore", "Stop…"]
        expect(page.locator("dialog")).to_contain_text("in device memory→GPU-1")
        expect(page.locator("dialog")).to_contain_text("On its own GPUs")
        expect(page.locator("dialog")).not_to_contain_text("or else on others")
        page.keyboard.press("Escape")
        without_gpus = {"state": "SUSPENDED", "parked_bytes": 0}
        assert page.evaluate(DIALOG_OF_A_PARKED_ONE, without_gpus) == ["Restore", "Stop…"]
        expect(page.locator("dialog")).to_contain_text("It holds no GPU.")


@pytest.mark.long
def test_a_login_that_is_refused_now_ends_its_stream_and_the_page_says_so(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        newcomer = "user/oidc-newcomer@example.com"
        fleet.fleet.cli("access", "grant", "viewer", newcomer)
        with open_page(browser, fleet.url, tokens["newcomer"], Complaints()) as page:
            expect_state(page, 0, "FREE")
            expect(page.locator("#who")).to_contain_text("· viewer")
            fleet.fleet.cli("access", "revoke", "viewer", newcomer)
            expect(page.locator("#contact")).to_contain_text("The coordinator refuses this login now")
            expect(page.locator("#who")).to_contain_text("· no role")
            assert state(page, 0) == "FREE"  # the last known state stays
            fleet.fleet.cli("access", "grant", "viewer", newcomer)
            expect(page.locator("#contact")).to_be_empty()
            fleet.fleet.cli("ca", "revoke", newcomer)
            page.wait_for_url("**/login?*")
            expect(page.locator(".refusal")).to_contain_text("the login has ended")


SHORT_MINUTE: Final = """
const setEach = window.setInterval;
window.setInterval = (call, pause) => setEach(call, pause === 60000 ? 500 : pause);
"""


@pytest.mark.long
def test_a_login_without_a_role_sees_that_and_nothing_that_is_not_so(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        with open_page(browser, fleet.url, tokens["newcomer"], Complaints()) as page:
            for path, shown in (
                ("", "The fleet is not shown"),
                ("workloads", "The workloads are not shown."),
                ("commands", "The commands are not shown."),
            ):
                page.goto(fleet.url + path)
                expect(page.locator("#contact")).to_contain_text("has no role")
                expect(page.locator("main")).to_contain_text(shown)
                expect(page.locator("main")).to_contain_text("has no role")
                expect(page.locator(".counts")).to_be_empty()
                for false in ("Loading", "No workload yet", "No command"):
                    expect(page.locator("main")).not_to_contain_text(false)
            expect(page.locator("#who")).to_contain_text("· no role")
            fleet.fleet.cli("access", "grant", "viewer", "user/oidc-newcomer@example.com")
            # Without a reload.
            expect(page.locator("main")).to_contain_text("No command is under way")
            expect(page.locator("main .box.bad")).to_be_hidden()
            fleet.fleet.cli("run", "--name", "train", "--gpus", "0", "--", "sleep", "600")
            page.goto(f"{fleet.url}workloads/train")
            expect(page.locator("main h1")).to_have_text("train")
            fleet.fleet.cli("access", "revoke", "viewer", "user/oidc-newcomer@example.com")
            expect(page.locator("#contact")).to_contain_text("has no role")
            page.goto(f"{fleet.url}workloads/train")
            expect(page.locator("main .box.bad")).to_contain_text("has no role")
            fleet.fleet.cli("access", "grant", "viewer", "user/oidc-newcomer@example.com")
            expect(page.locator("main h1")).to_have_text("train")
            page.goto(fleet.url)
            expect_state(page, 0, "FREE")
            expect(page.locator(".counts")).to_contain_text("4free")

            fleet.fleet.cli("access", "grant", "operator", "user/oidc-newcomer@example.com")
            page.goto(f"{fleet.url}workers/alpha")
            cordon = page.locator('button:text-is("Cordon…")')
            cordon.click()
            fleet.fleet.cli("access", "revoke", "operator", "user/oidc-newcomer@example.com")
            page.fill("dialog #reason", "a fan")
            page.click('dialog button:text-is("Cordon")')
            expect(page.locator("dialog .box.bad")).to_be_visible()
            page.keyboard.press("Escape")
            expect(cordon).to_have_count(0, timeout=10_000)
            page.add_init_script(SHORT_MINUTE)
            page.goto(f"{fleet.url}workers/alpha")
            expect(page.locator("h1")).to_have_text("alpha")
            expect(cordon).to_have_count(0)
            fleet.fleet.cli("access", "grant", "operator", "user/oidc-newcomer@example.com")
            expect(cordon).to_have_count(1)


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


WORDS = """async () => {
  const { bytes, rate } = await import("/static/words.js");
  return [bytes(5 * 2 ** 30), rate(5 * 2 ** 30, 2), rate(3 * 2 ** 20, 2), rate(1, 0)];
}"""


@pytest.mark.long
def test_bytes_and_rates_have_the_same_units(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(WORDS) == ["5.0 GiB", "2.5 GiB/s", "1.5 MiB/s", "unknown"]


@pytest.mark.long
def test_another_caller_of_the_same_role_is_shown(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(SHORT_MINUTE)
        page.goto(f"{web_fleet.url}workloads")
        expect(page.locator("#who")).to_contain_text("· admin")
        expect(page.locator("main")).to_contain_text("No workload yet")
        for caller, shown in (({"identity": "b"}, "b"), ({"identity": "b", "on_behalf_of": "c"}, "b for c")):
            page.evaluate("document.querySelector('main > *').id = 'old'")
            with page.expect_request("**/api/live"):  # the stream of the earlier caller ends
                page.route("**/api/session", partial(answer_json, {"role": "ADMIN", **caller}))
            expect(page.locator("#who")).to_have_text(f"{shown} · admin")
            expect(page.locator("#old")).to_have_count(0)


def answer_json(document: object, route: Route) -> None:
    """Answers a request in place of the server."""
    route.fulfill(json=document)


CUT_BODIES: Final = """async () => {
  const { ask } = await import("/static/dom.js");
  const failures = ["AbortError", "TimeoutError"].map((name) => new DOMException("cut", name));
  const told = [];
  for (const failure of [...failures, new TypeError("cut"), new SyntaxError("cut")]) {
    const status = failure.name === "SyntaxError" ? 502 : 200;
    window.fetch = async () => ({ ok: status === 200, status, json: () => Promise.reject(failure) });
    told.push(await ask("/api/command").catch((error) => `${error.status ?? error.name}: ${error.message}`));
  }
  return told;
}"""


@pytest.mark.long
def test_an_answer_that_breaks_off_is_told_as_none(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(CUT_BODIES) == [
            "AbortError: cut",
            "0: no answer from the server in time: if many windows of this page are open, close some",
            "0: the server does not answer: it may be starting again",
            "502: the server answered 502",
        ]


OUTPUT: Final = """
window.EventSource = class {
  constructor(url) {
    this.listeners = {};
    if (!url.includes("/output")) return;
    window.opened = (window.opened ?? 0) + 1;
    window.output = this;
  }
  addEventListener(kind, listener) {
    this.listeners[kind] = listener;
  }
  close() {}
};
window.write = (text, offset) => {
  output.onmessage({ data: JSON.stringify({ text }), lastEventId: String(offset) });
};
"""


@pytest.mark.long
def test_an_output_tells_what_it_lacks(browser: Browser, web_fleet: WebFleet) -> None:
    workload = {"workload_id": "w-1", "name": "one", "status": {"state": "EXITED"}}
    answer = {"workload": workload, "commands": [], "events": []}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.add_init_script(OUTPUT)
        page.goto(f"{web_fleet.url}workloads/w-1")
        page.wait_for_function("() => window.output?.listeners.end")
        tools, text = page.locator(".output-tools"), page.locator(".output")
        page.evaluate("write('a'.repeat(300000), 300000)")
        expect(tools).to_have_text(re.compile("Follow293 KiB$"))
        page.evaluate("write('b'.repeat(300000), 600000)")
        assert [text.evaluate(f"one => one.textContent.split('{one}').length - 1") for one in "ab"] == [
            100_000,
            300_000,
        ]
        shown = "586 KiB, of which the last 400,000 characters are shown"
        refused = "beta does not answer"
        opened = page.evaluate("opened")
        page.evaluate("data => output.listeners.refused({ data })", json.dumps({"message": refused}))
        expect(tools).to_have_text(f"Follow{shown}{refused}")
        page.wait_for_function("(opened) => window.opened > opened", arg=opened, timeout=10_000)
        page.evaluate("output.onerror()")
        expect(tools).to_contain_text("interrupted. The page asks for the rest again.")
        page.wait_for_function("(opened) => window.opened > opened + 1", arg=opened, timeout=10_000)
        page.evaluate("write('c', 600001); output.listeners.end()")
        expect(tools).to_have_text(f"Follow{shown}complete")


BIDIRECTIONAL: Final = """async () => {
  const { h } = await import("/static/dom.js");
  const child = h("i", {}, "\\u05d0\\u200f");
  const one = h("p", { title: "t\\u2066", "aria-label": "l\\u061c" }, "a\\u202eb", child);
  return [one.textContent, one.title, one.getAttribute("aria-label")];
}"""


@pytest.mark.long
def test_text_of_users_does_not_reorder_the_page(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("cordon", "alpha", "--reason", "fan\u202egpj.exe")
    with open_page(browser, fleet.url, fleet.token) as page:
        assert page.evaluate(BIDIRECTIONAL) == ["a\\u202eb\u05d0\\u200f", r"t\u2066", r"l\u061c"]
        expect(page.locator(".host .note")).to_have_text(r"cordoned: fan\u202egpj.exe")


@pytest.mark.long
def test_commands_name_ended_workloads(browser: Browser, fleet: WebFleet) -> None:
    workload = fleet.fleet.client.workload("train").workload_id
    fleet.fleet.cli("suspend", "train")
    fleet.fleet.cli("stop", "train")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}commands")
        links = page.locator(f'.command a[href="/workloads/{workload}"]')
        expect(links).to_have_text(["train", "train", "train"])
        page.locator(".command", has_text="suspend").get_by_text("Details").click()
        expect(page.locator(".card .command a").first).to_have_text("train")


@pytest.mark.long
def test_commands_name_ended_workloads_of_others(browser: Browser, tmp_path: Path) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        # Without a GPU, no lease of the history has its name.
        fleet.fleet.cli("run", "--name", "train", "--gpus", "0", "--", "sleep", "600")
        workload = fleet.fleet.client.workload("train").workload_id
        fleet.fleet.cli("stop", "train")
        with open_page(browser, fleet.url, tokens["viewer"]) as page:
            page.goto(f"{fleet.url}commands")
            links = page.locator(f'.command a[href="/workloads/{workload}"]')
            expect(links).to_have_text(["train", "train"])
            page.locator(".command", has_text="stop").get_by_text("Details").click()
            expect(page.locator(".card .command a").first).to_have_text("train")


@pytest.mark.long
def test_without_scripts_there_are_tables(browser: Browser, fleet: WebFleet) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        page.goto(fleet.url)
        page.fill("#token", fleet.token)
        page.click("button")
        page.wait_for_url("**/plain/fleet")
        expect(page.locator("tbody")).to_contain_text("train")
        page.click('a:text-is("Commands")')
        expect(page.locator("tbody")).to_contain_text("SUCCEEDED")
        page.click('button:text-is("Log out")')
        expect(page.locator("#token")).to_be_visible()
    finally:
        context.close()


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
        expect(page.locator("details[open] .output")).to_be_visible(timeout=5_000)
