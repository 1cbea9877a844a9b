"""A fleet whose coordinator serves the page, and a browser."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from leasehold_client.config import credentials_directory
from playwright.sync_api import Browser

from tests.integration.fleets import Fleet, make_fleet
from tests.ports import free_port

from .browsers import CHROMIUM, MISSING, open_browser


class WebFleet:
    """A fleet with the URL of its page."""

    def __init__(self, fleet: Fleet, url: str) -> None:
        self.fleet = fleet
        self.url = url

    @property
    def token(self) -> str:
        """The token of the coordinator's user."""
        return (credentials_directory() / "client.token").read_text().strip()


@pytest.fixture
def web_fleet(tmp_path: Path) -> Iterator[WebFleet]:
    """A coordinator with a page, and no worker."""
    address = f"127.0.0.1:{free_port()}"
    with make_fleet(tmp_path, "--web", address) as fleet:
        yield WebFleet(fleet, f"http://{address}/")


@pytest.fixture
def fleet(web_fleet: WebFleet) -> WebFleet:
    """A fleet with the worker alpha, on whose first GPU a counter runs."""
    web_fleet.fleet.start_worker("alpha")
    web_fleet.fleet.run_counter("train")
    return web_fleet


@pytest.fixture
def browser() -> Iterator[Browser]:
    """A browser of one test. Its event loop runs in this thread, where other tests run theirs."""
    if not CHROMIUM.exists():
        pytest.skip(MISSING)
    with open_browser() as found:
        yield found
