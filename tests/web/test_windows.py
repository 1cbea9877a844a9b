"""Windows of a browser: streams of hidden windows, and what a window shows after a gap of its live view."""

import re

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from .browsers import expect_state, open_page
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


@pytest.mark.long
def test_hidden_windows_give_all_streams_back_and_take_them_again(browser: Browser, fleet: WebFleet) -> None:
    """A browser has six connections to a server, and the page of a workload has two streams."""
    workload = f"{fleet.url}workloads/train"
    with open_page(browser, fleet.url, fleet.token) as page:
        expect_state(page, 0, "LEASED")
        page.goto("about:blank")
        hidden = [open_hidden(page.context, workload) for _ in range(2)]
        for one in hidden:
            expect(one.locator(".output")).to_contain_text(re.compile(r"\d"))
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
