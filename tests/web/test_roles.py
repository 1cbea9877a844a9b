"""Roles on the page: what each caller sees and may do, and logins that are refused."""

import contextlib
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from playwright.sync_api import Browser, Route, expect

from tests.coordinator.issuer import AUDIENCE, ISSUER, key_set, new_keys, sign
from tests.integration.fleets import make_fleet
from tests.ports import free_port

from .browsers import Complaints, expect_state, next_request, open_page, slot, state
from .conftest import WebFleet


@contextlib.contextmanager
def fleet_of_an_issuer(folder: Path) -> Iterator[tuple[WebFleet, dict[str, str]]]:
    """A fleet with users of an OpenID Connect issuer, and a token of each role. A newcomer has none."""
    keys = new_keys()
    jwks = folder / "jwks.json"
    jwks.write_bytes(key_set(keys))
    settings = folder / "coordinator.toml"
    settings.write_text(
        f'oidc_listen = "127.0.0.1:0"\n[oidc]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\n'
        f'jwks_file = "{jwks}"\nname_claim = "email"\nrole_claim = "groups"\n'
        'roles = { viewers = "viewer", users = "user", operators = "operator" }\n'
    )
    algorithm, key = keys["es"]
    tokens = {
        role: sign(key, algorithm, "es", email=f"{role}@example.com", groups=[f"{role}s"])
        for role in ("viewer", "user", "operator", "newcomer")
    }
    address = f"127.0.0.1:{free_port()}"
    with make_fleet(folder, "--web", address, "--config", str(settings)) as fleet:
        yield WebFleet(fleet, f"http://{address}/"), tokens


@pytest.mark.long
def test_a_role_sees_its_own_buttons_and_the_server_refuses_the_others(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        fleet.fleet.run_counter("train")
        for role, sees in (("viewer", False), ("user", False), ("operator", True)):
            complaints = Complaints()
            with open_page(browser, fleet.url, tokens[role], complaints) as page:
                expect(page.locator("#who")).to_contain_text(f"oidc-{role}@example.com · {role}")
                expect_state(page, 0, "LEASED")
                page.click(slot(page, 0))
                expect(page.locator(".drawer")).to_contain_text("train")
                for button in ("Suspend", "Cordon…"):
                    assert page.locator(f'.drawer button:text-is("{button}")').count() == int(sees)
                answer = page.evaluate(
                    """async () => (await fetch("/api/action", {method: "POST", headers: {
                    "Leasehold-Page": "1", "Content-Type": "application/json"},
                    body: JSON.stringify({action: "suspend", workload: "train"})})).status"""
                )
                assert answer == (200 if sees else 403)
                page.goto(f"{fleet.url}workloads")
                page.click('a:text-is("train")')
                expect(page.locator("h1")).to_contain_text("train")
                assert (page.locator(".output").count() == 1) is sees
            assert [line for line in complaints.lines if "403" not in line] == []


@pytest.mark.long
def test_what_a_viewer_may_not_see_is_unknown_and_not_zero(browser: Browser, tmp_path: Path) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        for name in ("parked", "train"):
            fleet.fleet.run_counter(name)
        fleet.fleet.cli("suspend", "parked")
        with open_page(browser, fleet.url, tokens["viewer"], Complaints()) as page:
            expect(page.locator(".counts")).to_contain_text("1parked, size unknown")
            page.click('.parked a:has-text("parked")')
            expect(page.locator(".facts").first).to_contain_text("Parkedsize unknown in host memoryHost")
            page.goto(f"{fleet.url}workloads")
            page.click('a:text-is("train")')
            expect(page.locator(".facts").first).to_contain_text("Ready since")
        with open_page(browser, fleet.url, fleet.token) as page:
            expect(page.locator(".counts")).to_contain_text(re.compile(r"1parked, [\d.]+ [KM]iB"))
            page.goto(f"{fleet.url}workloads")
            page.click('a:text-is("train")')
            expect(page.locator(".facts").first).to_contain_text(re.compile(r"Ready after[\d.]+ m?s"))


@pytest.mark.long
def test_a_login_that_is_refused_now_ends_its_stream_and_the_page_says_so(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        newcomer = "user/oidc-newcomer@example.com"
        fleet.fleet.cli("access", "grant", "viewer", newcomer)
        with open_page(browser, fleet.url, tokens["newcomer"], Complaints()) as page:
            expect_state(page, 0, "FREE")
            expect(page.locator("#who")).to_contain_text("· viewer")
            fleet.fleet.cli("access", "revoke", "viewer", newcomer)
            expect(page.locator("#contact")).to_contain_text("The coordinator refuses this login now")
            expect(page.locator("#who")).to_contain_text("· no role")
            assert state(page, 0) == "FREE"  # the last known state stays
            fleet.fleet.cli("access", "grant", "viewer", newcomer)
            expect(page.locator("#contact")).to_be_empty()
            fleet.fleet.cli("ca", "revoke", newcomer)
            page.wait_for_url("**/login?*")
            expect(page.locator(".refusal")).to_contain_text("the login has ended")


OFTEN_READ: Final = """{
  const setEach = window.setInterval;
  window.setInterval = (call, pause) => setEach(call, pause === 10000 ? 500 : pause);
}"""
"""The page reads its role each 10 s."""

UNREAD: Final = """{
  const setEach = window.setInterval;
  window.setInterval = (call, pause) => (pause === 10000 ? 0 : setEach(call, pause));
}"""
"""The page learns a change of its role by its stream only."""


@pytest.mark.long
def test_a_login_without_a_role_sees_that_and_nothing_that_is_not_so(
    browser: Browser, tmp_path: Path
) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        with open_page(browser, fleet.url, tokens["newcomer"], Complaints()) as page:
            for path, shown in (
                ("", "The fleet is not shown"),
                ("workloads", "The workloads are not shown."),
                ("commands", "The commands are not shown."),
            ):
                page.goto(fleet.url + path)
                expect(page.locator("#contact")).to_contain_text("has no role")
                expect(page.locator("main")).to_contain_text(shown)
                expect(page.locator("main")).to_contain_text("has no role")
                expect(page.locator(".counts")).to_be_empty()
                for false in ("Loading", "No workload yet", "No command"):
                    expect(page.locator("main")).not_to_contain_text(false)
            expect(page.locator("#who")).to_contain_text("· no role")
            fleet.fleet.cli("access", "grant", "viewer", "user/oidc-newcomer@example.com")
            # Without a reload.
            expect(page.locator("main")).to_contain_text("No command is under way")
            expect(page.locator("main .box.bad")).to_be_hidden()
            fleet.fleet.cli("run", "--name", "train", "--gpus", "0", "--", "sleep", "600")
            page.goto(f"{fleet.url}workloads/train")
            expect(page.locator("main h1")).to_have_text("train")
            fleet.fleet.cli("access", "revoke", "viewer", "user/oidc-newcomer@example.com")
            expect(page.locator("#contact")).to_contain_text("has no role")
            page.goto(f"{fleet.url}workloads/train")
            expect(page.locator("main .box.bad")).to_contain_text("has no role")
            fleet.fleet.cli("access", "grant", "viewer", "user/oidc-newcomer@example.com")
            expect(page.locator("main h1")).to_have_text("train")
            page.goto(fleet.url)
            expect_state(page, 0, "FREE")
            expect(page.locator(".counts")).to_contain_text("4free")

            fleet.fleet.cli("access", "grant", "operator", "user/oidc-newcomer@example.com")
            page.add_init_script(UNREAD)
            page.goto(f"{fleet.url}workers/alpha")
            cordon = page.locator('button:text-is("Cordon…")')
            cordon.click()
            fleet.fleet.cli("access", "revoke", "operator", "user/oidc-newcomer@example.com")
            page.fill("dialog #reason", "a fan")
            page.click('dialog button:text-is("Cordon")')
            expect(page.locator("dialog .box.bad")).to_be_visible()
            page.keyboard.press("Escape")
            expect(cordon).to_have_count(0)
            page.add_init_script(OFTEN_READ)
            page.goto(f"{fleet.url}workers/alpha")
            expect(page.locator("h1")).to_have_text("alpha")
            expect(cordon).to_have_count(0)
            fleet.fleet.cli("access", "grant", "operator", "user/oidc-newcomer@example.com")
            expect(cordon).to_have_count(1)


@pytest.mark.long
def test_an_open_page_follows_a_change_of_the_role(browser: Browser, tmp_path: Path) -> None:
    """A change that shows more or less ends the stream. A viewer sees as much as a user."""
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        fleet.fleet.run_counter("train")
        with open_page(browser, fleet.url, tokens["viewer"], Complaints()) as page:
            page.add_init_script(UNREAD)
            page.goto(f"{fleet.url}workloads/train")
            spec = page.get_by_label("Specification")
            expect(spec).to_contain_text("Only its owner and operators see the specification.")
            suspend = page.locator('button:text-is("Suspend")')
            expect(suspend).to_have_count(0)
            fleet.fleet.cli("access", "grant", "operator", "user/oidc-viewer@example.com")
            expect(suspend).to_have_count(1, timeout=30_000)
            expect(spec).to_contain_text("Eviction policy")
            fleet.fleet.cli("access", "revoke", "operator", "user/oidc-viewer@example.com")
            expect(suspend).to_have_count(0, timeout=30_000)
            page = page.context.new_page()
            page.goto(f"{fleet.url}workloads")
            for role in ("user", "viewer"):
                identity = "user/oidc-viewer@example.com"
                change = ("grant", role) if role == "user" else ("revoke", "user")
                fleet.fleet.cli("access", *change, identity)
                expect(page.locator("#who")).to_contain_text(f"· {role}")


@pytest.mark.long
def test_an_absent_specification_has_its_reason(browser: Browser, web_fleet: WebFleet) -> None:
    """The caller may have got its role after the answer."""
    workload = {"workload_id": "w-1", "name": "one", "status": {"state": "RUNNING"}}
    with open_page(browser, web_fleet.url, web_fleet.token, Complaints()) as page:
        for more, told in (
            ({}, "Only its owner and operators see the specification."),
            ({"origin": "CLAIM"}, "The specification is unknown: the worker has not reported it yet."),
        ):
            answer = {"workload": {**workload, **more}, "commands": [], "events": []}
            page.route("**/api/workloads/w-1", partial(answer_json, answer))
            page.goto(f"{web_fleet.url}workloads/w-1")
            expect(page.get_by_label("Specification")).to_contain_text(told)


@pytest.mark.long
def test_another_caller_of_the_same_role_is_shown(browser: Browser, web_fleet: WebFleet) -> None:
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(OFTEN_READ)
        page.goto(f"{web_fleet.url}workloads")
        expect(page.locator("#who")).to_contain_text("· admin")
        expect(page.locator("main")).to_contain_text("No workload yet")
        for caller, shown in (({"identity": "b"}, "b"), ({"identity": "b", "on_behalf_of": "c"}, "b for c")):
            page.evaluate("document.querySelector('main > *').id = 'old'")
            with page.expect_request("**/api/live"):  # the stream of the earlier caller ends
                page.route("**/api/session", partial(answer_json, {"role": "ADMIN", **caller}))
            expect(page.locator("#who")).to_have_text(f"{shown} · admin")
            expect(page.locator("#old")).to_have_count(0)


READ: Final = """async () => {
  const { readSession } = await import("/static/live.js");
  readSession();
}"""


@pytest.mark.long
def test_a_late_answer_about_the_role_is_dropped(browser: Browser, web_fleet: WebFleet) -> None:
    asked: list[Route] = []
    with open_page(browser, web_fleet.url, web_fleet.token) as page:
        page.add_init_script(OFTEN_READ)
        page.goto(f"{web_fleet.url}workloads")
        expect(page.locator("#who")).to_contain_text("· admin")
        page.route("**/api/session", lambda route: asked.append(route))
        first = next_request(page, asked)
        page.wait_for_timeout(1500)
        assert asked == []  # one read at a time by itself
        page.evaluate(READ)
        answer_json({"role": "VIEWER", "identity": "a"}, next_request(page, asked))
        expect(page.locator("#who")).to_have_text("a · viewer")
        answer_json({"role": "OPERATOR", "identity": "a"}, first)
        page.wait_for_timeout(300)
        expect(page.locator("#who")).to_have_text("a · viewer")


def answer_json(document: object, route: Route) -> None:
    """Answers a request in place of the server."""
    route.fulfill(json=document)


@pytest.mark.long
def test_commands_name_ended_workloads_of_others(browser: Browser, tmp_path: Path) -> None:
    with fleet_of_an_issuer(tmp_path) as (fleet, tokens):
        fleet.fleet.start_worker("alpha")
        # Without a GPU, no lease of the history has its name.
        fleet.fleet.cli("run", "--name", "train", "--gpus", "0", "--", "sleep", "600")
        workload = fleet.fleet.client.workload("train").workload_id
        fleet.fleet.cli("stop", "train")
        with open_page(browser, fleet.url, tokens["viewer"]) as page:
            page.goto(f"{fleet.url}commands")
            links = page.locator(f'.command a[href="/workloads/{workload}"]')
            expect(links).to_have_text(["train", "train"])
            page.locator(".command", has_text="stop").get_by_text("Details").click()
            expect(page.locator(".card .command a").first).to_have_text("train")
