"""The login: where it leads, what a link fills in, and how many may log in at once."""

from urllib.parse import quote, urlencode

import pytest
from leasehold_web.view_paths import view_path
from playwright.sync_api import Browser, expect

from .conftest import WebFleet
from .http import Client

FORM = "application/x-www-form-urlencoded"
FOREIGN = (
    "",
    "//evil.example/",
    "/\\evil.example/",
    "https://evil.example/",
    "javascript:alert(1)",
    "/timeline//evil.example",
    "/timeline@evil.example",
    "/workloads/one\r\nSet-Cookie: a=b",
    "/workloads/\u0661\u2044",
    "/login",
    "/api/session",
    "/workloads/" + 600 * "x",
)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/?gpu=GPU-1",
        "/timeline?range=60000",
        "/workloads/train",
        "/commands/c-1",
        "/plain/fleet?page_token=a%3D",
    ],
)
def test_a_view_is_where_a_login_may_lead(path: str) -> None:
    assert view_path(path) == path


@pytest.mark.parametrize("text", FOREIGN)
def test_an_address_that_is_no_view_leads_to_the_fleet(text: str) -> None:
    assert view_path(text) == "/"


@pytest.mark.long
def test_a_login_leads_to_the_wanted_view_and_to_no_other_site(web_fleet: WebFleet) -> None:
    client = Client(web_fleet.url)
    assert client.get("/timeline?range=60000").headers["Location"] == ("/login?next=/timeline?range%3D60000")
    assert client.get("/plain/commands").headers["Location"] == "/login?next=/plain/commands"
    assert client.get("/plain").headers["Location"] == "/plain/fleet"
    assert client.get("/plain/").headers["Location"] == "/login"
    assert 'name="next" value="/workloads/a"' in client.get("/login?next=/workloads/a").body
    for wanted, found in (("/workloads/a", "/workloads/a"), *((one, "/") for one in FOREIGN[1:4])):
        assert "evil" not in client.get(f"/login?next={quote(wanted)}").body
        body = urlencode({"token": web_fleet.token, "next": wanted})
        answer = client.request("POST", "/login", body, {"Origin": client.origin, "Content-Type": FORM})
        assert (answer.status, answer.headers["Location"]) == (303, found)
    body = urlencode({"token": "wrong", "next": "/commands"})
    answer = client.request("POST", "/login", body, {"Origin": client.origin, "Content-Type": FORM})
    assert 'name="next" value="/commands"' in answer.body  # after a wrong token, too


@pytest.mark.long
def test_a_login_without_a_token_says_so_and_names_the_place_of_the_token(web_fleet: WebFleet) -> None:
    client = Client(web_fleet.url)
    for token, told in (("", "the token is empty: paste the token"), (10_000 * "x", "the token is too long")):
        body = urlencode({"token": token, "next": "/"})
        answer = client.request("POST", "/login", body, {"Origin": client.origin, "Content-Type": FORM})
        assert answer.status == 403
        assert told in answer.body
        assert "Paste the content of client.token in the coordinator&#x27;s state directory" in answer.body


@pytest.mark.long
def test_a_deep_link_survives_the_login(browser: Browser, web_fleet: WebFleet) -> None:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{web_fleet.url}timeline?range=60000")
        page.fill("#token", web_fleet.token)
        page.click("#login button")
        page.wait_for_url("**/timeline?range=60000")
        expect(page.locator('button[data-range="60000"]')).to_have_attribute("aria-pressed", "true")
        # The session ends while the page is open.
        page.click('nav a:text-is("Commands")')
        expect(page.locator("h1")).to_have_text("Commands")
        # A list that still loads would lead to the login by itself, during the click.
        expect(page.locator("main")).not_to_contain_text("Loading…")
        context.clear_cookies()
        page.click('nav a:text-is("Workloads")')
        page.wait_for_url("**/login?*")
        expect(page.locator(".refusal")).to_contain_text("the login has ended")
        page.fill("#token", web_fleet.token)
        page.click("#login button")
        page.wait_for_url("**/workloads")
    finally:
        context.close()


@pytest.mark.long
def test_a_link_with_a_token_fills_the_form_and_waits_for_its_user(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A hostile site could otherwise log its visitors in as somebody else (login CSRF)."""
    context = browser.new_context()
    try:
        page = context.new_page()
        posts: list[str] = []
        context.on("request", lambda request: posts.append(request.url) if request.method == "POST" else None)
        page.goto(f"{web_fleet.url}login#token={web_fleet.token}")
        expect(page.locator("#token")).to_have_value(web_fleet.token)
        expect(page.locator("#login button")).to_be_focused()
        assert page.url == f"{web_fleet.url}login"  # the history has no token
        page.wait_for_timeout(500)
        assert (posts, context.cookies()) == ([], [])
        page.keyboard.press("Enter")
        page.wait_for_url(web_fleet.url)
    finally:
        context.close()


@pytest.mark.long
def test_a_link_with_a_token_fills_a_form_that_is_already_shown(
    browser: Browser, web_fleet: WebFleet
) -> None:
    """A browser then changes only the part of the address after #, and loads nothing."""
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(f"{web_fleet.url}login")
        expect(page.locator("#token")).to_be_focused()
        page.goto(f"{web_fleet.url}login#token={web_fleet.token}")
        expect(page.locator("#token")).to_have_value(web_fleet.token)
        expect(page.locator("#login button")).to_be_focused()
        assert page.url == f"{web_fleet.url}login"
        page.keyboard.press("Enter")
        page.wait_for_url(web_fleet.url)
    finally:
        context.close()
