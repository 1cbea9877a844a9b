"""Makes the pictures of the page in docs/images again: ``python -m tests.web.screenshots``.

They show a fleet of simulated GPUs that suspends, restores, moves and swaps.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Final

from playwright.sync_api import Browser, Page

from tests import prefork
from tests.integration.fleets import Fleet, make_fleet
from tests.ports import free_port

from .browsers import open_browser, open_page
from .conftest import WebFleet

IMAGES: Final = Path(__file__).resolve().parents[2] / "docs/images"
DESK: Final = {"width": 1280, "height": 560}
PHONE: Final = {"width": 390, "height": 780}


def play(fleet: Fleet) -> None:
    """The story of the pictures, of about half a minute."""
    fleet.start_worker("alpha", 4)
    fleet.start_worker("beta", 8)
    fleet.run_counter("train")
    fleet.run_counter("serve")
    fleet.run_counter("llama", worker="beta", gpus=4)
    fleet.run_counter("notebook", worker="beta", gpus=2)
    time.sleep(3)
    fleet.cli("remap", "train", "--to", "alpha/3")
    time.sleep(3)
    fleet.cli("suspend", "serve")
    fleet.run_counter("burst")
    time.sleep(4)
    fleet.cli("restore", "serve", "--to", "alpha/2")
    fleet.cli("suspend", "notebook")
    time.sleep(4)
    fleet.cli("remap", "train", "serve", "--swap")
    fleet.cli("restore", "notebook", "--to", "beta/6,beta/7")
    fleet.cli("cordon", "beta/5", "--reason", "replaces a fan")
    time.sleep(3)
    fleet.cli("suspend", "burst")
    time.sleep(3)


def take(browser: Browser, web: WebFleet) -> None:
    """Takes the pictures."""
    for scheme in ("light", "dark"):
        with open_page(browser, web.url, web.token, color_scheme=scheme, viewport=DESK) as page:
            visit(page, web, "/timeline?range=60000", f"timeline-{scheme}")
            visit(page, web, "/", f"fleet-{scheme}")
    with open_page(browser, web.url, web.token, viewport={**DESK, "height": 720}) as page:
        page.click('.slot:has-text("llama")')
        page.click('.drawer button:text-is("Suspend")')
        page.wait_for_selector("dialog .plan")
        save(page, "dry-run")
    with open_page(browser, web.url, web.token, color_scheme="dark", viewport=PHONE) as page:
        visit(page, web, "/", "phone")


def visit(page: Page, web: WebFleet, path: str, name: str) -> None:
    """Takes a picture of a view."""
    page.goto(web.url.rstrip("/") + path)
    page.wait_for_timeout(2_000)
    save(page, name)


def save(page: Page, name: str) -> None:
    """Saves a picture."""
    page.screenshot(path=IMAGES / f"{name}.png")


def main() -> None:
    """Plays the story in a folder of its own, and takes the pictures."""
    address = f"127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory(prefix="leasehold-pictures-") as folder:
        os.environ["XDG_STATE_HOME"] = folder
        with (
            prefork.executed(),
            make_fleet(Path(folder), "--web", address) as fleet,
            open_browser() as browser,
        ):
            play(fleet)
            take(browser, WebFleet(fleet, f"http://{address}/"))


if __name__ == "__main__":
    main()
