"""The dialogs of actions: refusals, long names, the focus, and their sentences."""

import pytest
from playwright.sync_api import Browser, expect

from .browsers import Complaints, open_page, slot
from .conftest import WebFleet


@pytest.mark.long
def test_a_refused_action_can_be_corrected(browser: Browser, fleet: WebFleet) -> None:
    complaints = Complaints()  # a browser complains of a refusal
    with open_page(browser, fleet.url, fleet.token, complaints) as page:
        page.click(slot(page, 3))
        page.click('.drawer button:text-is("Cordon…")')
        page.fill("dialog #reason", "   ")
        page.click('dialog button:text-is("Cordon")')
        expect(page.locator("dialog .box.bad")).to_be_visible()
        expect(page.locator('dialog button:text-is("Cordon")')).to_be_disabled()
        page.fill("dialog #reason", "a fan")
        page.click('dialog button:text-is("Cordon")', timeout=5_000)
        expect(page.locator("dialog .command .badge")).to_have_text("succeeded")
    assert [line for line in complaints.lines if "Failed to load resource" not in line] == []
