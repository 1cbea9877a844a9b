"""What the page says of one workload: its state, checkpoints, output and bytes."""

import json
import re
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.integration.fleets import COUNTER

from .browsers import Complaints, confirm, open_page, slot
from .conftest import WebFleet


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
        (200, {"refusal": refusal("UNKNOWN_WORKER", "no worker has this name")}),
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
        expect(card).to_contain_text("Its worker was deleted, and has its checkpoints.")
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
def test_a_command_shows_the_workloads_that_it_suspended_first(browser: Browser, fleet: WebFleet) -> None:
    gpus = str(len(fleet.fleet.client.gpus()))
    fleet.fleet.cli("run", "--name", "big", "--gpus", gpus, "--preempt", "train", "--", "sleep", "600")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}commands")
        shown = page.locator(".command", has_text="big")
        expect(shown).to_contain_text("Suspended first: train.")
        expect(shown.get_by_role("link", name="train")).to_have_attribute("href", re.compile("/workloads/"))


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
def test_the_policy_of_the_specification_is_told_apart_from_that_of_the_last_suspend(
    browser: Browser, web_fleet: WebFleet
) -> None:
    parked_by = {"process_strategy": "STOP"}
    spec = {"eviction": {"process_strategy": "CHECKPOINT"}, "helper": {"grace": 2}}
    row = {"workload_id": "w-1", "name": "one", "worker_id": "worker-a", "create_time": 1, "spec": spec}
    row |= {"status": {"state": "STOPPED", "parked_by": parked_by}}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        answer = {"workload": row, "commands": [], "events": []}
        page.route("**/api/workloads/w-1", lambda route: route.fulfill(json=answer))
        page.goto(f"{web_fleet.url}workloads/w-1")
        facts = page.get_by_label("Specification")
        expect(facts).to_contain_text("Eviction policyretain+checkpoint")
        expect(page.get_by_label("State", exact=True)).to_contain_text("Suspended byretain+stop")
        expect(facts).to_contain_text("yes: suspended 2.00 s after a yield request")
        spec["helper"] = {"process_strategy": "STOP"}
        page.reload()
        expect(facts).to_contain_text("yes: stopped 10.0 s after a yield request")


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
window.write = (text, end, offset) => {
  output.onmessage({ data: JSON.stringify({ text, offset, next_offset: end }), lastEventId: String(end) });
};
"""


@pytest.mark.long
def test_a_long_output_is_shown_from_its_end(browser: Browser, fleet: WebFleet) -> None:
    code = "for one in range(300_000): print(one, 'x' * 60)"
    fleet.fleet.cli("run", "--gpus", "0", "--name", "long", "--", sys.executable, "-c", code)
    fleet.fleet.cli("wait", "long", "--for", "ended")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}workloads/long")
        expect(page.locator(".output-tools")).to_have_text(
            "Follow19.3 MiB, of which the last 400,000 characters are showncomplete"
        )
        assert (
            page.locator(".output").evaluate("one => one.textContent.split('\\n').at(-2).split(' ')[0]")
            == "299999"
        )


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
        page.evaluate("write('c', 601024, 601023)")
        assert str(text.text_content()).endswith("b\n[1023 B are no longer kept]\nc")
        shown = "587 KiB, of which the last 400,000 characters are shown"
        refused = "beta does not answer"
        opened = page.evaluate("opened")
        page.evaluate("data => output.listeners.refused({ data })", json.dumps({"message": refused}))
        expect(tools).to_have_text(f"Follow{shown}{refused}")
        page.wait_for_function("(opened) => window.opened > opened", arg=opened)
        page.evaluate("output.onerror()")
        expect(tools).to_contain_text("interrupted. The page asks for the rest again.")
        page.wait_for_function("(opened) => window.opened > opened + 1", arg=opened)
        page.evaluate("write('c', 601025); output.listeners.end()")
        expect(tools).to_have_text(f"Follow{shown}complete")
