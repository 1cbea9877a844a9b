"""The actions of the page, each with its dry run, and what it then shows."""

import re
import signal
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from .browsers import act, confirm, expect_state, open_page, slot
from .conftest import WebFleet


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
        kept = f"`leasehold gpu unbind {gpu}` of '{gpu}'"
        assert page.evaluate(WITH_NAMES, kept) == kept
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
def test_the_drawer_of_a_gpu_links_the_host_whose_cordon_it_shows(browser: Browser, fleet: WebFleet) -> None:
    with open_page(browser, fleet.url, fleet.token) as page:
        page.click(slot(page, 3))
        cordon = page.locator(".drawer dd", has_text="replaces a fan")
        fleet.fleet.cli("cordon", "alpha/3", "--reason", "replaces a fan")
        expect(cordon).to_be_visible()
        expect(cordon.get_by_role("link")).to_have_count(0)
        fleet.fleet.cli("uncordon", "alpha/3")
        fleet.fleet.cli("cordon", "alpha", "--reason", "replaces a fan")
        expect(cordon).to_contain_text("for the whole host alpha")
        cordon.get_by_role("link", name="alpha").click()
        expect(page.locator('button:text-is("Uncordon")')).to_be_visible()


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
