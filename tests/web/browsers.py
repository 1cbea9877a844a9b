"""A browser that looks at the page: real Chromium, and what it complained about."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Route, expect, sync_playwright

CHROMIUM: Final = Path("/usr/bin/chromium")
MISSING: Final = "no Chromium here: install Debian's chromium"
ARGUMENTS: Final = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-breakpad",
    "--disable-dev-shm-usage",
]
CHANGED_NETWORK: Final = "net::ERR_NETWORK_CHANGED"
"""What Chromium says of open requests when any network link of this machine changes, as tests of hosts do."""

SCRIPTED_STREAM: Final = """
window.EventSource = class {
  constructor() {
    window.source = this;
    window.opened = (window.opened ?? 0) + 1;
  }
  close() {}
};
window.tell = (message) => window.source.onmessage({ data: JSON.stringify(message) });
"""
"""For a page without other streams than the live view: the test tells the changes."""

TIMEOUT_MS: Final = 45_000
"""How long the page may take for a step: a machine that plays other suites is slow."""

expect.set_options(timeout=TIMEOUT_MS)


@dataclass
class Complaints:
    """What the console of a browser said: errors, warnings and exceptions."""

    lines: list[str] = field(default_factory=list)

    def listen(self, context: BrowserContext) -> None:
        """Collects the complaints of all pages of a context."""

        def told(message: ConsoleMessage) -> None:
            # The page asks again by itself, as after a restart of the coordinator.
            if message.type in ("error", "warning") and CHANGED_NETWORK not in message.text:
                self.lines.append(f"{message.type}: {message.text}")

        context.on("console", told)
        context.on("weberror", lambda error: self.lines.append(f"exception: {error.error}"))


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser without windows."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_page(
    browser: Browser, url: str, token: str, complaints: Complaints | None = None, **options: object
) -> Iterator[Page]:
    """A page of somebody who has logged in with a token.

    Args:
        browser: The browser.
        url: URL of the page, with a slash at its end.
        token: The token.
        complaints: Gets what the console says. None: nothing may be said.
        options: Options of the context, such as ``viewport``.
    """
    mine = complaints or Complaints()
    context = browser.new_context(**options)  # type: ignore[arg-type]  # by name
    context.set_default_timeout(TIMEOUT_MS)
    mine.listen(context)
    try:
        page = context.new_page()
        page.goto(f"{url}login#token={token}")
        page.click("#login button")
        page.wait_for_url(url)
        yield page
        if complaints is None:
            assert mine.lines == [], mine.lines
    finally:
        context.close()


def next_request(page: Page, asked: list[Route]) -> Route:
    """Waits for the next of the requests that a route of the page collects, and takes it."""
    end = time.monotonic() + TIMEOUT_MS / 1000
    while not asked:
        assert time.monotonic() < end, "no request came"
        page.wait_for_timeout(20)
    return asked.pop(0)


def slot(page: Page, number: int) -> str:
    """The selector of a GPU of alpha."""
    return f'.slot[aria-label^="GPU {number} of alpha"]'


def expect_state(page: Page, number: int, wanted: str) -> None:
    """Waits until the page shows a GPU in a state."""
    expect(page.locator(slot(page, number))).to_have_attribute("data-state", wanted)


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
