"""Who gets in: by TLS with a client certificate, by `leasehold web`, and by the link of the demonstration."""

import json
import os
import re
import signal
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from pathlib import Path
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.fleets import Fleet, make_fleet
from tests.ports import free_port
from tests.prefork import COMMAND_LINE, Forked

from .browsers import Complaints, open_page
from .conftest import WebFleet
from .http import Client

TIMEOUT_S = 60
LINK = re.compile(r"(http://127\.0\.0\.1:\d+/)login#token=(\S+)")


@contextmanager
def web_verb(fleet: Fleet) -> Iterator[tuple[str, str]]:
    """`leasehold web`, as its URL and token."""
    process = fleet.start_verb("web", "--listen", "127.0.0.1:0")
    try:
        assert process.stdout is not None
        found = LINK.search(process.stdout.readline())
        assert found
        yield found[1], found[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT_S) == 0
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.long
def test_leasehold_web_serves_its_user_over_a_restart(browser: Browser, web_fleet: WebFleet) -> None:
    fleet = web_fleet.fleet
    fleet.start_worker("alpha")
    with web_verb(fleet) as (url, token):
        stranger = Client(url)
        assert stranger.log_in(web_fleet.token).status == 403  # not a token of the coordinator
        complaints = Complaints()
        with open_page(browser, url, token, complaints) as page:
            expect(page.locator("#who")).to_contain_text("· admin")
            expect(page.locator('.slot[data-state="FREE"]')).to_have_count(4)
            fleet.end("coordinator", signal.SIGTERM)
            contact = re.compile(
                r"^No contact with the coordinator since \d\d:\d\d:\d\d\. "
                r"The page shows the state of \d\d:\d\d:\d\d, and connects again by itself\.$"
            )
            expect(page.locator("#contact")).to_have_text(contact)
            text = page.locator("#contact").text_content()
            page.wait_for_timeout(5_000)  # the watches try again meanwhile
            assert page.locator("#contact").text_content() == text
            later = page.context.new_page()
            later.goto(f"{url}workloads")
            expect(later.locator("#contact")).to_have_text(
                "The page can't begin: the coordinator does not answer: try again once it runs. "
                "It tries again by itself."
            )
            fleet.start_coordinator()
            expect(page.locator("#contact")).to_be_empty()
            expect(later.locator("#contact")).to_be_empty()
            expect(later.locator("main")).to_contain_text("No workload yet")
            fleet.wait(lambda: fleet.worker_state("alpha") == "WORKER_STATE_CONNECTED")
            fleet.run_counter("train")
            expect(page.locator('.slot[data-state="LEASED"]')).to_have_count(1)
        assert [line for line in complaints.lines if "status of 5" not in line] == []


@pytest.mark.long
def test_leasehold_web_tells_a_blocked_user_why(tmp_path: Path) -> None:
    with make_fleet(tmp_path, is_mutual=True) as fleet, web_verb(fleet) as (url, token):
        # Root acts by the socket, which needs no certificate.
        socket = f"unix:{tmp_path}/store.sock"
        assert Client(url).log_in(token).status == 303
        fleet.cli("ca", "revoke", "user/tester", LEASEHOLD_COORDINATOR=socket, LEASEHOLD_CREDENTIALS="")
        told = Client(url).log_in(token)
        assert told.status == 403
        assert "user/tester is blocked: an admin may" in told.body
        fleet.cli("ca", "unblock", "user/tester", LEASEHOLD_COORDINATOR=socket, LEASEHOLD_CREDENTIALS="")
        assert Client(url).log_in(token).status == 303
        fleet.end("coordinator", signal.SIGTERM)
        assert Client(url).log_in(token).status == 303  # the page tells the outage
        fleet.start_coordinator()


def test_leasehold_web_stays_on_loopback(web_fleet: WebFleet) -> None:
    fleet = web_fleet.fleet
    fleet.refuse("web", "--listen", "0.0.0.0:7480", code=2, match="not on loopback")
    fleet.refuse("web", "--listen", "nowhere", code=2, match="invalid address")
    taken = web_fleet.url.removeprefix("http://").rstrip("/")
    fleet.refuse("web", "--listen", taken, code=2, match="can't listen on .*: Address already in use")


@pytest.mark.long
def test_a_client_certificate_logs_in_over_tls(tmp_path: Path) -> None:
    port = free_port()
    with make_fleet(tmp_path, "--web", f"0.0.0.0:{port}", is_mutual=True) as fleet:
        assert fleet.mutual is not None
        own = Path(fleet.mutual.client_variables["LEASEHOLD_CREDENTIALS"])

        def ask(
            method: str, path: str, body: str = "", *, has_certificate: bool, cookie: str = ""
        ) -> tuple[int, str]:
            tls = ssl.create_default_context(cafile=str(own / "ca.pem"))
            if has_certificate:
                tls.load_cert_chain(own / "client.pem", own / "client.key")
            connection = HTTPSConnection("127.0.0.1", port, context=tls, timeout=TIMEOUT_S)
            headers = {"Origin": f"https://127.0.0.1:{port}", "Cookie": cookie}
            headers["Content-Type"] = "application/x-www-form-urlencoded"
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.headers.get("Set-Cookie", "") or answer.read().decode()
            connection.close()
            return answer.status, text

        form = urlencode({"method": "certificate"})
        status, text = ask("POST", "/login", form, has_certificate=False)
        assert (status, "presented no client certificate" in text) == (403, True)
        assert "certificate of this browser" in ask("GET", "/login", has_certificate=True)[1]
        status, cookie = ask("POST", "/login", form, has_certificate=True)
        assert status == 303
        assert cookie.startswith("__Host-leasehold-")
        assert "Secure" in cookie
        session = cookie.split(";")[0]
        status, text = ask("GET", "/api/session", has_certificate=False, cookie=session)
        assert (status, "user/tester" in text) == (200, True)
        # A revocation ends the session, like other calls.
        listed = json.loads(fleet.cli("ca", "list", "-o", "json").stdout)["certificates"]
        (serial,) = (one["serial"] for one in listed if one["identity"] == "user/tester")
        # Root revokes it by the socket, which needs no certificate.
        socket = f"unix:{tmp_path}/store.sock"
        fleet.cli("ca", "revoke", serial, LEASEHOLD_COORDINATOR=socket, LEASEHOLD_CREDENTIALS="")
        fleet.wait(lambda: ask("GET", "/api/session", has_certificate=False, cookie=session)[0] == 401)


@pytest.mark.long
def test_the_demonstration_prints_the_address_of_its_page(browser: Browser, tmp_path: Path) -> None:
    told = tmp_path / "told"
    with told.open("w") as output:
        arguments = ["demo", "--keep", "--dir", str(tmp_path / "demo")]
        demo = Forked(COMMAND_LINE, arguments, stdout=output, stderr=output, env=os.environ)
    try:
        deadline = time.monotonic() + 120
        while (found := LINK.search(told.read_text())) is None:
            assert demo.poll() is None, told.read_text()
            assert time.monotonic() < deadline, told.read_text()
            time.sleep(0.1)
        with open_page(browser, found[1], found[2]) as page:
            expect(page.locator(".slot")).to_have_count(8)
            page.click('nav a:text-is("Timeline")')
            page.click('button:text-is("Table")')
            expect(page.locator("tbody tr", has_text="counter").first).to_be_visible()
            # The demonstration replaced its coordinator, and the history has the moves before and after.
            assert page.locator("tbody tr", has_text="counter").count() > 6
        demo.send_signal(signal.SIGINT)
        assert demo.wait(60) == 0, told.read_text()
    finally:
        demo.kill()
