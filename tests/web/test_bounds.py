"""The bounds of the server: browsers that send or read nothing, and callers that log in again and again."""

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlencode

import pytest
import uvloop
from aiohttp import web
from google.protobuf.message import Message
from leasehold.v1.access_service_pb2 import WhoAmIRequest, WhoAmIResponse
from leasehold.v1.event_pb2 import Event
from leasehold_coordinator.access.authority import open_authority
from leasehold_coordinator.server.mutual_context import mutual_context
from leasehold_web import (
    connections,
    conversions,
    guards,
    login_places,
    request_pace,
    server,
    sessions,
    streams,
)
from leasehold_web.documents import Document, document
from leasehold_web.entries import Api, Entry
from leasehold_web.feed import Feed
from leasehold_web.server import WebServer

TIMEOUT_S = 30.0
Port = int


class Doors:
    """Logins of a test, in which any token is valid. No API answers them."""

    hint = ""

    async def by_token(self, token: str, address: str) -> Entry:
        if token == "slow":
            await asyncio.Event().wait()

        async def api() -> Api:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def leave() -> None:
            pass

        return Entry(token, api, object(), b"", leave)

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        return await self.by_token("", address)

    async def again(self, kept: bytes) -> Entry:
        return await self.by_token("", "")


def on_server(
    story: Callable[[Port, web.Server], Awaitable[None]],
    tls: ssl.SSLContext | None = None,
    limit: int = server.CONNECTION_LIMIT,
) -> None:
    """Runs a story with a server of the page."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        page = WebServer(Doors(), ["127.0.0.1"], connection_limit=limit)
        await page.start(listener, tls)
        try:
            async with asyncio.timeout(2 * TIMEOUT_S):
                assert page._runner is not None
                assert page._runner.server is not None
                await story(listener.getsockname()[1], page._runner.server)
        finally:
            await page.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the coordinator's
        runner.run(run())


async def send(
    port: Port, first: str, *headers: str, body: str = "", address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request by a connection that keeps few unread bytes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
    connection.bind((address, 0))
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=connection, limit=4_096)
    lines = [f"{first} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Origin: http://127.0.0.1:{port}", *headers]
    writer.write(("\r\n".join(lines) + "\r\n\r\n" + body).encode())
    await writer.drain()
    return reader, writer


async def until(is_true: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(TIMEOUT_S):
        while not is_true():  # noqa: ASYNC110 - nothing tells of connections
            await asyncio.sleep(0.02)


async def begin_login(
    port: Port, token: str, address: str = "127.0.0.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a login."""
    body = urlencode({"token": token})
    form = "Content-Type: application/x-www-form-urlencoded"
    length = f"Content-Length: {len(body)}"
    return await send(port, "POST /login", form, length, body=body, address=address)


async def log_in(port: Port, token: str = "x") -> str:
    """Logs in, and returns the cookie."""
    reader, writer = await begin_login(port, token)
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    writer.close()
    return next(line for line in head.split("\r\n") if line.startswith("Set-Cookie")).split(" ")[1].strip(";")


@pytest.mark.parametrize("path", ["/login", "/api/action"])
def test_a_body_that_never_comes_is_no_longer_awaited(path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(guards, "REQUEST_LIMIT_S", 0.2)

    async def story(port: Port, _: web.Server) -> None:
        cookie = await log_in(port)
        form = "Content-Type: application/x-www-form-urlencoded"
        if path.startswith("/api/"):
            form = "Content-Type: application/json\r\nLeasehold-Page: 1"
        reader, writer = await send(port, f"POST {path}", f"Cookie: {cookie}", form, "Content-Length: 60000")
        async with asyncio.timeout(TIMEOUT_S):
            assert b" 503 " in await reader.readline()
        writer.close()

    on_server(story)


def test_a_browser_that_reads_nothing_loses_its_connection(monkeypatch: Any) -> None:
    monkeypatch.setattr(streams, "WRITE_LIMIT_S", 0.2)
    monkeypatch.setattr(Feed, "_watch_all", lambda self: asyncio.Event().wait())

    monkeypatch.setattr(Feed, "_state", lambda self: {"is_loading": True, "text": "x" * 16_000_000})

    async def story(port: Port, running: web.Server) -> None:
        cookie = await log_in(port)
        await until(lambda: not running.connections)
        _, writer = await send(port, "GET /api/live", f"Cookie: {cookie}")
        await until(lambda: bool(running.connections))
        await until(lambda: not running.connections)
        writer.transport.abort()

    on_server(story)


def test_answers_that_nobody_reads_end_their_connection(monkeypatch: Any) -> None:
    """Many requests at once on one connection, of somebody who has not logged in."""
    monkeypatch.setattr(server, "READ_LIMIT_S", 0.5)

    async def story(port: Port, running: web.Server) -> None:
        one = f"GET /static/style.css HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        _, writer = await send(port, "GET /static/style.css", body=1_000 * one)
        await until(lambda: bool(running.connections))
        await until(lambda: not running.connections)
        writer.transport.abort()

    on_server(story)


def test_requests_above_the_rate_of_their_address_wait_and_hold_up_no_other(monkeypatch: Any) -> None:
    monkeypatch.setattr(request_pace, "REQUESTS_PER_S", 0.01)
    monkeypatch.setattr(request_pace, "BURST_S", 100.0)

    async def story(port: Port, _: web.Server) -> None:
        flood = [await send(port, "GET /login") for _ in range(20)]
        answers = [asyncio.create_task(reader.readline()) for reader, _ in flood]
        await until(lambda: any(one.done() for one in answers))
        reader, writer = await send(port, "GET /login", address="127.0.0.2")
        assert b" 200 " in await reader.readline()
        assert sum(one.done() for one in answers) == 1
        for one in answers:
            one.cancel()
        for _reader, waiting in (*flood, (reader, writer)):
            waiting.transport.abort()

    on_server(story)


def test_a_live_view_costs_as_many_requests_as_its_rows(monkeypatch: Any) -> None:
    monkeypatch.setattr(Feed, "_watch_all", lambda self: asyncio.Event().wait())
    monkeypatch.setattr(Feed, "rows", 1e9)

    async def story(port: Port, _: web.Server) -> None:
        cookie = await log_in(port)
        reader, writer = await send(port, "GET /api/live", f"Cookie: {cookie}")
        elsewhere, closing = await send(port, "GET /login", address="127.0.0.2")
        assert b" 200 " in await elsewhere.readline()
        looking = asyncio.create_task(reader.readline())
        await asyncio.sleep(0.1)
        assert not looking.done()
        looking.cancel()
        for one in (writer, closing):
            one.transport.abort()

    on_server(story)


def test_slow_logins_of_one_address_keep_no_other_out() -> None:
    async def story(port: Port, _: web.Server) -> None:
        slow = [await begin_login(port, "slow") for _ in range(login_places.LOGINS_PER_ADDRESS)]
        await asyncio.sleep(0.2)
        reader, writer = await begin_login(port, "x")
        assert b" 403 " in await reader.readline()
        await reader.readuntil(b"logins of 127.0.0.1 are under way")
        writer.close()
        reader, writer = await begin_login(port, "x", address="127.0.0.2")
        assert b" 303 " in await reader.readline()
        for one in (*slow, (reader, writer)):
            one[1].close()

    on_server(story)


def test_a_slow_login_gives_its_place_to_one_that_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(login_places, "LOGIN_LIMIT", 2)
    monkeypatch.setattr(login_places, "LOGIN_LIMIT_S", 1.0)
    monkeypatch.setattr(login_places, "WAIT_LIMIT_S", 30.0)

    async def story(port: Port, _: web.Server) -> None:
        slow = [await begin_login(port, "slow") for _ in range(2)]
        reader, writer = await begin_login(port, "x", address="127.0.0.2")
        assert b" 303 " in await reader.readline()
        writer.close()
        for one, other in slow:
            assert b" 403 " in await one.readline()
            await one.readuntil(b"the login took too long")
            other.close()

    on_server(story)


@pytest.mark.parametrize("path", ["/plain/fleet", "/api/session"])
def test_the_calls_of_a_session_have_a_bound(path: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(guards, "CALL_LIMIT", 2)

    async def story(port: Port, _: web.Server) -> None:
        cookie = await log_in(port)
        waiting = [await send(port, f"GET {path}", f"Cookie: {cookie}") for _ in range(2)]
        await asyncio.sleep(0.2)
        reader, writer = await send(port, f"GET {path}", f"Cookie: {cookie}")
        assert b" 429 " in await reader.readline()
        for one in (*waiting, (reader, writer)):
            one[1].close()

    on_server(story)


def test_the_streams_of_one_caller_keep_out_no_other(monkeypatch: Any) -> None:
    monkeypatch.setattr(streams, "STREAMS_PER_CALLER", 2)
    monkeypatch.setattr(Feed, "_watch_all", lambda self: asyncio.Event().wait())

    async def story(port: Port, _: web.Server) -> None:
        async def look(cookie: str) -> bytes:
            reader, writer = await send(port, "GET /api/live", f"Cookie: {cookie}")
            looking.append(writer)
            return await reader.readline()

        looking: list[asyncio.StreamWriter] = []
        logins = [await log_in(port) for _ in range(3)]
        answers = [await look(cookie) for cookie in logins]
        assert [b" 429 " in answer for answer in answers] == [False, False, True]
        assert b" 200 " in await look(await log_in(port, "other"))
        for writer in looking:
            writer.transport.abort()

    on_server(story)


def test_a_session_tells_why_a_further_stream_is_refused(monkeypatch: Any) -> None:
    """A browser hides the status of a stream from its page."""
    monkeypatch.setattr(streams, "STREAMS_PER_SESSION", 1)
    monkeypatch.setattr(Feed, "_watch_all", lambda self: asyncio.Event().wait())

    class Access:
        async def WhoAmI(self, request: WhoAmIRequest, **call: Any) -> WhoAmIResponse:
            return WhoAmIResponse(identity="user/ann")

    async def by_token(doors: Doors, token: str, address: str) -> Entry:
        async def api() -> Any:
            return SimpleNamespace(access=Access(), metadata=())

        async def leave() -> None:
            pass

        return Entry(token, api, object(), b"", leave)

    monkeypatch.setattr(Doors, "by_token", by_token)

    async def story(port: Port, _: web.Server) -> None:
        async def told() -> Any:
            reader, writer = await send(port, "GET /api/session", f"Cookie: {cookie}", "Connection: close")
            answer = await reader.read()
            writer.transport.abort()
            return json.loads(answer.partition(b"\r\n\r\n")[2]).get("full")

        cookie = await log_in(port)
        assert await told() is None
        reader, writer = await send(port, "GET /api/live", f"Cookie: {cookie}")
        assert b" 200 " in await reader.readline()
        assert await told() == "1 streams of this user are open: close some of its windows"
        writer.transport.abort()

    on_server(story)


def test_a_stream_ends_with_the_time_of_its_session(monkeypatch: Any) -> None:
    """A browser with an open stream may send no request for hours."""
    later = SimpleNamespace(time=lambda: time.time() + sessions.SESSION_LIFE_S)
    monkeypatch.setattr(streams, "time", later)
    monkeypatch.setattr(Feed, "_watch_all", lambda self: asyncio.Event().wait())

    async def story(port: Port, _: web.Server) -> None:
        cookie = await log_in(port)
        reader, writer = await send(port, "GET /api/live", f"Cookie: {cookie}", "Connection: close")
        assert b" 200 " in await reader.readline()
        async with asyncio.timeout(TIMEOUT_S):
            await reader.read()
        writer.transport.abort()
        reader, writer = await send(port, "GET /api/session", f"Cookie: {cookie}")
        assert b" 401 " in await reader.readline()
        writer.transport.abort()

    on_server(story)


def server_tls(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS of a server, and of its browsers."""
    authority = open_authority(folder)
    pair = authority.issue_server(["127.0.0.1"])
    tls = mutual_context(pair.key, pair.chain, authority.pem, ssl.CERT_OPTIONAL)
    return tls, ssl.create_default_context(cadata=authority.pem.decode())


async def open_silent(port: Port) -> socket.socket:
    """A connection that sends nothing."""
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", port))
    return connection


async def wait_closed(connection: socket.socket) -> None:
    """Waits until the server closes a connection."""
    with connection, suppress(ConnectionResetError):
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""


@pytest.mark.parametrize("has_tls", [True, False])
def test_connections_are_bounded_before_their_handshake(
    has_tls: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_LIMIT_S", 2 * TIMEOUT_S)
    monkeypatch.setattr(connections, "IDLE_S", 2 * TIMEOUT_S)

    async def story(port: Port, _: web.Server) -> None:
        ends = [asyncio.create_task(wait_closed(await open_silent(port))) for _ in range(40)]
        await until(lambda: sum(one.done() for one in ends) >= 35)
        assert not all(one.done() for one in ends)
        for one in ends:
            one.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    on_server(story, server_tls(tmp_path)[0] if has_tls else None, limit=5)


def test_a_connection_without_a_handshake_gives_its_place_back(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_LIMIT_S", 0.5)
    tls, browser = server_tls(tmp_path)

    async def story(port: Port, _: web.Server) -> None:
        await wait_closed(await open_silent(port))
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=browser)
        writer.write(f"GET /login HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        assert b" 200 " in await reader.readline()
        writer.transport.abort()

    on_server(story, tls, limit=1)


def test_long_answers_are_converted_in_slices_and_one_at_a_time_for_each_caller(monkeypatch: Any) -> None:
    monkeypatch.setattr(conversions, "SLICE_S", 0.0)
    most = now = 0

    def convert(message: Message) -> Document:
        nonlocal most, now
        now += 1
        most = max(most, now)
        return document(message)

    monkeypatch.setattr(conversions, "document", convert)

    async def story() -> None:
        converting = conversions.Conversions()
        events = [Event(event_id=f"e-{number}") for number in range(100)]
        asked = [asyncio.create_task(converting.documents("ann", events)) for _ in range(4)]
        nonlocal now
        while not all(one.done() for one in asked):
            await asyncio.sleep(0)
            now = 0  # each turn of the loop
        assert [one.result()[99] for one in asked] == 4 * [{"event_id": "e-99"}]

    asyncio.run(story())
    assert most <= 2, "one in each turn, and the first of the next caller"


MALFORMED = (
    "nonsense\r\n\r\n",
    "GET / HTTP/9.9\r\n\r\n",
    "GET / HTTP/1.1\r\nbad header\r\n\r\n",
    "GET /" + 10_000 * "x" + " HTTP/1.1\r\n\r\n",
    "POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: x\r\n\r\n",
    "PATCH /login HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\r\n",
    "GET /nothing HTTP/1.1\r\nHost: {host}\r\n\r\n",
    "GET / HTTP/1.1\r\nHost: {host}\r\nExpect: more\r\n\r\n",
)


@pytest.mark.parametrize("text", MALFORMED)
def test_the_answer_to_a_malformed_request_has_the_policy(text: str, caplog: Any) -> None:
    async def story(port: Port, _: web.Server) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text.format(host=f"127.0.0.1:{port}").encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert head.split(" ")[1].startswith("4"), head
        for name, value in guards.HEADERS.items():
            assert f"{name}: {value}\r\n" in head
        writer.close()

    on_server(story)
    assert "Traceback" not in caplog.text  # anybody could fill the log
