"""A thousand hosts with eight GPUs each: the page shows them soon, scrolls, and follows changes."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, expect

from .browsers import open_page
from .conftest import WebFleet

HOSTS: Final = 1_000
LIGHT: Final = [sys.executable, "-m", "bench.light_workers"]
ROOT: Final = Path(__file__).resolve().parents[2]

FRAMES = """async () => {
  const list = document.querySelector(".fleet");
  const times = [];
  let last = performance.now();
  for (let step = 0; step < 90; step += 1) {
    list.scrollTop += 160;
    await new Promise(requestAnimationFrame);
    const now = performance.now();
    times.push(now - last);
    last = now;
  }
  times.sort((a, b) => a - b);
  return {median: times[45], rows: document.querySelectorAll(".host").length, top: list.scrollTop};
}"""


@contextmanager
def light_workers(address: str, count: int) -> Iterator[None]:
    """Workers without GPUs of their own, which report eight each."""
    process = subprocess.Popen([*LIGHT, address, str(count), "0"], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.long
def test_a_thousand_hosts(browser: Browser, web_fleet: WebFleet) -> None:
    fleet = web_fleet.fleet
    with light_workers(fleet.worker_address, HOSTS):
        fleet.wait(lambda: len(fleet.client.workers()) == HOSTS, timeout_s=120)
        with open_page(browser, web_fleet.url, web_fleet.token) as page:
            page.goto(web_fleet.url)
            began = time.monotonic()
            expect(page.locator(".host").first).to_be_visible()
            first_s = time.monotonic() - began
            expect(page.locator(".counts")).to_contain_text("8,000", timeout=60_000)
            complete_s = time.monotonic() - began
            assert page.locator(".host").count() < 60  # only the rows in sight exist
            found = page.evaluate(FRAMES)
            assert found["top"] > 10_000
            assert found["rows"] < 60
            page.fill("input[type=search]", "light-000999")
            expect(page.locator(".host")).to_have_count(1)
            page.click('nav a:text-is("Timeline")')
            expect(page.locator("canvas[role=application]")).to_be_visible()
            page.click('nav a:text-is("Fleet")')
            expect(page.locator(".host").first).to_be_visible()
        # Told, and not required: the machine may be busy.
        print(
            f"first row after {first_s:.2f} s, all GPUs after {complete_s:.2f} s, a frame of "
            f"{found['median']:.1f} ms while scrolling"
        )
