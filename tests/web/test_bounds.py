"""The bounds of the server: browsers that send or read nothing, and callers that log in again and again."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlencode

import pytest
import uvloop
from aiohttp import web
from leasehold_web import guards, server, streams
from leasehold_web.entries import Api, Entry
from leasehold_web.feed import Feed
from leasehold_web.server import WebServer

TIMEOUT_S = 30.0
Port = int


class Doors:
    """Logins of a test, in which any token is valid. No API answers them."""

    hint = ""

    async def by_token(self, token: str, address: str) -> Entry:
        async def api() -> Api:
            return await asyncio.Event().wait()  # type: ignore[return-value]

        async def leave() -> None:
            pass

        return Entry(token, api, object(), b"", leave)

    async def by_certificate(self, der: bytes, address: str) -> Entry:
        return await self.by_token("", address)

    async def again(self, kept: bytes) -> Entry:
        return await self.by_token("", "")


def on_server(story: Callable[[Port, web.Server], Awaitable[None]]) -> None:
    """Runs a story with a server of the page."""

    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        listener.setblocking(False)
        page = WebServer(Doors(), ["127.0.0.1"])
        await page.start(listener, None)
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
    port: Port, first: str, *headers: str, body: str = ""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Sends a request by a connection that keeps few unread bytes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    connection.setblocking(False)
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


async def log_in(port: Port) -> str:
    """Logs in, and returns the cookie."""
    body = urlencode({"token": "x"})
    form = "Content-Type: application/x-www-form-urlencoded"
    reader, writer = await send(port, "POST /login", form, f"Content-Length: {len(body)}", body=body)
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
