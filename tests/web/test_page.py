"""The page in a real browser: restarts, failing scripts, tables without scripts, words and units."""

import re
import signal
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from .browsers import Complaints, expect_state, open_page, state
from .conftest import WebFleet


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
def test_a_cordoned_host_counts_all_its_gpus(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("cordon", "alpha", "--reason", "a fan")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(".host-name a")
        gpus = page.locator(".resource", has_text="GPUs")
        expect(gpus).to_contain_text(re.compile("0 of 4 *free"))


MEMORY: Final = """async () => {
  const { planView } = await import("/static/plan_view.js");
  const tier = (name, available) => ({ tier: name, needed_bytes: 1024, available_bytes: available });
  const host = { needed_bytes: 4096, available_bytes: 8192 };
  return [
    [{ tiers: [tier("HOST"), tier("DEVICE")] }, "suspend"],
    [{ tiers: [tier("HOST", 2048), tier("DEVICE")], host_memory: host }, "suspend"],
    [{ tiers: [tier("DISK", 2048)], host_memory: host }, "suspend"],
    [{ host_memory: host }, "remap"],
    [{ tiers: [tier("HOST")] }, "restore"],
    [{ tiers: [tier("DISK")], host_memory: host }, "restore"],
    [{ tiers: [tier("HOST", 8192)], host_memory: host }, "restore"],
  ].map(([plan, verb]) =>
    [...planView(plan, verb).querySelectorAll("th, td")].map((one) => one.textContent).join(" "));
}"""


@pytest.mark.long
def test_the_memory_of_a_plan_is_needed_or_held_and_has_no_column_without_values(
    browser: Browser, web_fleet: WebFleet
) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        assert page.evaluate(MEMORY) == [
            "Tier Needed host 1.0 KiB device 1.0 KiB",
            "Tier Needed Available host 1.0 KiB 2.0 KiB device 1.0 KiB \N{EN DASH}",
            "Tier Needed Available disk 1.0 KiB 2.0 KiB host 4.0 KiB 8.0 KiB",
            "Tier Needed Available host 4.0 KiB 8.0 KiB",
            "Tier Held host 1.0 KiB",
            "Tier Held Needed Available disk 1.0 KiB - - host - 4.0 KiB 8.0 KiB".replace("-", "\N{EN DASH}"),
            "Tier Needed Available host 4.0 KiB 8.0 KiB",  # members that must be suspended first
        ]


@pytest.mark.long
def test_the_dry_run_of_a_restore_says_that_the_bytes_are_held(browser: Browser, fleet: WebFleet) -> None:
    fleet.fleet.cli("suspend", "train")
    with open_page(browser, fleet.url, fleet.token) as page:
        page.goto(f"{fleet.url}workloads/train")
        page.click('.title-line button:text-is("Restore")')
        expect(page.locator("dialog .plan")).to_contain_text(re.compile(r"MemoryTierHeldhost\d"))


WORDS = """async () => {
  const { bytes, rate, stateText } = await import("/static/words.js");
  const yielded = stateText({ status: { state: "SUSPENDED", yielded: true } });
  return [bytes(5 * 2 ** 30), rate(5 * 2 ** 30, 2), rate(3 * 2 ** 20, 2), rate(1, 0), yielded];
}"""


@pytest.mark.long
def test_words_are_the_same_everywhere(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        words = ["5.0 GiB", "2.5 GiB/s", "1.5 MiB/s", "unknown", "suspended (yielded)"]
        assert page.evaluate(WORDS) == words


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
