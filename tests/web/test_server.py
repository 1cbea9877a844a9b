"""The server of the page without a browser: logins, cookies, origins, and what a hostile site tries."""

import signal
import time

import pytest

from .conftest import WebFleet
from .http import Client

HOSTILE = '<img src=x onerror="alert(1)">'


@pytest.fixture
def client(web_fleet: WebFleet) -> Client:
    """A client that has logged in."""
    found = Client(web_fleet.url)
    assert found.log_in(web_fleet.token).status == 303
    return found


def test_a_login_gives_a_strict_cookie_and_a_wrong_token_gives_none(web_fleet: WebFleet) -> None:
    client = Client(web_fleet.url)
    assert client.get("/").headers["Location"] == "/login"
    assert client.get("/api/session").status == 401
    refused = client.log_in("wrong")
    assert (refused.status, client.cookie) == (403, "")
    assert "no login has this token" in refused.body
    answer = client.log_in(web_fleet.token)
    assert (answer.status, answer.headers["Location"]) == (303, "/")
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(answer.headers["Set-Cookie"].split("; "))
    assert client.get("/api/session").json["role"] == "ADMIN"
    assert client.get("/").status == 200


def test_each_answer_has_the_policy(client: Client) -> None:
    for path in ("/", "/login", "/static/app.js", "/api/session", "/plain/fleet", "/nothing"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"


def test_a_change_comes_from_our_scripts_only(web_fleet: WebFleet, client: Client) -> None:
    cordon = {"action": "cordon", "worker": "alpha", "reason": "test"}
    assert client.request("GET", "/api/action").status == 405
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": ""}):
        assert client.post("/api/action", cordon, **headers).status == 403
    assert client.post("/api/action", cordon, **{"Leasehold-Page": ""}).status == 403
    assert client.post("/api/action", cordon, **{"Content-Type": "text/plain"}).status == 400
    assert client.request("GET", "/api/session", headers={"Host": "evil.example"}).status == 403
    answer = client.post("/api/action", cordon)
    assert (answer.status, answer.json["reason"]) == (404, "UNKNOWN_WORKER")
    assert web_fleet.fleet.client.workers() == []


MALFORMED = (
    "",
    "[]",
    "{",
    '{"action": "format"}',
    '{"action": "suspend"}',
    '{"action": "suspend", "workload": 3}',
    '{"action": "suspend", "workload": "w", "more": 1}',
    '{"action": "remap", "moves": []}',
    '{"action": "stop", "workload": "w", "grace_s": -1}',
    '{"action": "cordon", "worker": "w", "reason": " "}',
    '{"action": "cordon", "worker": "w", "reason": "' + 300 * "x" + '"}',
)


def test_a_malformed_action_is_refused(client: Client) -> None:
    headers = {"Origin": client.origin, "Leasehold-Page": "1", "Content-Type": "application/json"}
    for body in MALFORMED:
        answer = client.request("POST", "/api/action", body, headers)
        assert answer.status == 400, body
        assert "the action is not valid" in answer.json["message"]


def test_odd_paths_and_queries_are_refused_with_words(client: Client) -> None:
    assert client.get("/api/history?start=yesterday").status == 400
    assert client.get("/api/samples?" + "&".join(["worker=a"] * 65)).status == 400
    assert client.get("/api/names?" + "&".join(["workload=a"] * 51)).status == 400
    assert client.get("/api/names?workload=%22a%22").status == 400
    assert client.get("/api/workloads/..%2F..%2Fetc").status == 404
    assert client.get("/api/workloads?page_token=made-up").json["reason"] == "INVALID_TOKEN"
    assert client.get("/api/workloads/w/output?offset=--1").status == 400
    assert client.get("/static/page.html").status == 404
    assert client.get("/static/..%2Fserver.py").status == 404
    assert "follow a link" in client.get("/api/workloads/%00").json["message"]
    too_long = client.log_in(70_000 * "x")
    assert too_long.status == 413
    assert "paste the token alone" in too_long.body


def test_an_odd_login_is_refused_with_words(web_fleet: WebFleet) -> None:
    client = Client(web_fleet.url)
    form = "application/x-www-form-urlencoded"
    for headers, body, status in (
        ({"Content-Type": f"{form}; charset=nonsense"}, "token=x", 403),
        ({"Content-Type": f"{form}; charset=utf-16"}, "token=x", 403),
        ({"Content-Type": "multipart/form-data"}, "x", 403),
        ({"Content-Type": "multipart/form-data; boundary=a"}, "--a\r\n\r\nx\r\n--a--\r\n", 403),
        ({"Content-Encoding": "gzip"}, "x", 403),
        ({"Content-Type": form}, "token=%ED%A0%80", 403),
        ({"Content-Type": form}, "&".join(["token=x"] * 100), 400),
        ({"Content-Type": form}, "\xff", 400),
    ):
        answer = client.request("POST", "/login", body, {"Origin": client.origin, **headers})
        assert answer.status == status, body  # and the end of the fleet finds no traceback in the log


def test_an_unknown_address_leads_to_the_fleet(client: Client) -> None:
    for path in ("/hosts", "/workloads/one/two", "/plain/nothing"):
        answer = client.get(path)
        assert (answer.status, '<a href="/">Go to the fleet</a>' in answer.body) == (404, True)
    assert client.request("POST", "/nothing", "", {"Origin": client.origin}).status == 404
    assert "<html" not in client.get("/api/nothing").body


@pytest.mark.long
def test_the_checkpoints_of_a_workload_are_asked_of_its_own_worker(fleet: WebFleet, client: Client) -> None:
    fleet.fleet.start_worker("beta")
    fleet.fleet.end("beta")
    path = "/api/workloads/train/checkpoints"
    assert client.get(path).json == {"checkpoints": [], "unreachable": []}
    worker = fleet.fleet.client.workload("train").worker_id
    fleet.fleet.end("alpha")
    assert client.get(path).json == {"checkpoints": [], "unreachable": [worker]}


def test_a_logout_ends_the_session(client: Client) -> None:
    with client.stream("/api/live") as live:
        assert live.readline() == b'data: {"reset":{}}\n'
        answer = client.request("POST", "/logout", "", {"Origin": client.origin})
        assert answer.status == 303
        assert client.get("/api/session").status == 401
        while live.readline():
            pass  # the stream ends


@pytest.mark.long
def test_logins_with_one_token_share_a_view_that_outlives_each(web_fleet: WebFleet, client: Client) -> None:
    other = Client(web_fleet.url)
    assert other.log_in(web_fleet.token).status == 303
    with client.stream("/api/live") as first:
        first.readline()
        with other.stream("/api/live") as second:
            second.readline()
            client.request("POST", "/logout", "", {"Origin": client.origin})
            while first.readline():
                pass  # the stream ends
            web_fleet.fleet.start_worker("alpha", 1)
            while b'"alpha"' not in second.readline():
                pass  # each has a deadline


def test_a_session_survives_a_restart_of_the_coordinator(web_fleet: WebFleet, client: Client) -> None:
    web_fleet.fleet.end("coordinator", signal.SIGTERM)
    web_fleet.fleet.start_coordinator()
    assert client.get("/api/session").status == 200
    client.request("POST", "/logout", "", {"Origin": client.origin})
    web_fleet.fleet.kill_coordinator()
    web_fleet.fleet.start_coordinator()
    assert client.get("/api/session").status == 401  # a logout survives it too


@pytest.mark.long
def test_tables_without_scripts_escape_what_they_show(web_fleet: WebFleet, client: Client) -> None:
    fleet = web_fleet.fleet
    fleet.start_worker("alpha", 2)
    fleet.run_counter("train")
    fleet.cli("cordon", "alpha/1", "--reason", HOSTILE)
    text = client.get("/plain/fleet").body
    assert "train" in text
    assert "CORDONED" in text
    for kind in ("fleet", "workloads", "commands"):
        body = client.get(f"/plain/{kind}").body
        assert "<table>" in body
        assert HOSTILE not in body
    workloads, commands = client.get("/plain/workloads").body, client.get("/plain/commands").body
    assert "<td>train</td>" in workloads
    assert "<td>alpha</td>" in workloads
    assert "<td>train</td>" in commands
    assert "<td>alpha, GPU-" in commands
    assert "SUCCEEDED" in commands
    history = client.get("/api/history").json["spans"]
    assert [(one["workload_name"], one["state"]) for one in history if one["state"] == "LEASED"] == [
        ("train", "LEASED")
    ]


@pytest.mark.long
def test_tables_mark_what_a_host_out_of_contact_reported_last(web_fleet: WebFleet, client: Client) -> None:
    fleet = web_fleet.fleet
    fleet.start_worker("alpha", 1)
    fleet.run_counter("train")
    fleet.start_worker("beta", 1)
    for kind in ("fleet", "workloads"):
        assert "last known" not in client.get(f"/plain/{kind}").body
    fleet.processes["alpha"].send_signal(signal.SIGSTOP)
    try:
        fleet.wait(lambda: fleet.worker_state("alpha") != "WORKER_STATE_CONNECTED")
        gpus, workloads = client.get("/plain/fleet").body, client.get("/plain/workloads").body
    finally:
        fleet.processes["alpha"].send_signal(signal.SIGCONT)
    assert "<td>LEASED (last known)</td>" in gpus
    assert "<td>FREE</td>" in gpus
    assert "<td>RUNNING (last known)</td>" in workloads


def test_a_refused_login_is_in_the_audit(web_fleet: WebFleet) -> None:
    assert Client(web_fleet.url).log_in("wrong").status == 403
    deadline_s = time.monotonic() + 60
    while "web:127.0.0.1" not in (text := web_fleet.fleet.cli("get", "audit", "-o", "json").stdout):
        assert time.monotonic() < deadline_s, text
        time.sleep(0.2)
    assert "no login has this token" in text
    assert "wrong" not in text
