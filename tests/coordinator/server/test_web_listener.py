"""TLS of the web page: renewed certificates, and authorities of clients that are not trusted any more."""

import asyncio
import datetime
import ssl
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from leasehold_coordinator.access.authority import Authority, open_authority
from leasehold_coordinator.server import web_listener
from leasehold_coordinator.server.own_pki import PkiContent
from leasehold_coordinator.server.web_listener import WebListener

from tests.certificates import Holder, issue
from tests.ports import free_port

TIMEOUT_S = 30
NAMES = frozenset({"localhost", "127.0.0.1"})


def content(authority: Authority, client_ca: bytes) -> PkiContent:
    """Files of a PKI of others."""
    server = authority.issue_server(NAMES)
    begin_time = datetime.datetime.now(datetime.UTC)
    expire_time = begin_time + datetime.timedelta(days=1)
    return PkiContent(server.chain, server.key, client_ca, begin_time, expire_time)


async def login_page(port: int, client: Holder, folder: Path, roots: bytes) -> str:
    """The login page, read by a browser with a client certificate."""
    client.write(folder, "client")
    context = ssl.create_default_context(cadata=roots.decode())
    context.load_cert_chain(folder / "client.pem", folder / "client.key")
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    writer.write(f"GET /login HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    try:
        return (await reader.read()).decode()
    finally:
        writer.transport.abort()


def test_an_authority_that_is_removed_admits_no_browser(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(web_listener, "POLL_S", 0.05)
    for name in ("former", "present"):
        (tmp_path / name).mkdir()
    former, present = open_authority(tmp_path / "former"), open_authority(tmp_path / "present")
    pki = SimpleNamespace(content=content(present, former.pem + present.pem))
    listeners = SimpleNamespace(
        authentication=None, oidc_authentication=None, inner_address="", sessions_path=None
    )
    ann, mallory = issue(present, "user/ann"), issue(former, "user/mallory")

    async def story() -> None:
        page = WebListener(listeners, None, None, NAMES, pki)  # type: ignore[arg-type]  # nobody logs in
        port = free_port()
        await page.start(f"0.0.0.0:{port}")
        watch = asyncio.create_task(page.watch())

        async def is_admitted(client: Holder) -> bool:
            folder = tmp_path / client.issued.serial
            try:
                return "certificate of this browser" in await login_page(port, client, folder, present.pem)
            except (ssl.SSLError, ConnectionError):
                return False

        try:
            assert await is_admitted(ann)
            assert await is_admitted(mallory)
            pki.content = content(present, present.pem)
            async with asyncio.timeout(TIMEOUT_S):
                while await is_admitted(mallory):  # noqa: ASYNC110 - the listener polls
                    await asyncio.sleep(0.05)
            assert await is_admitted(ann)
        finally:
            watch.cancel()
            await page.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())


def test_a_certificate_that_cannot_be_used_leaves_the_present_one_in_use(
    tmp_path: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(web_listener, "POLL_S", 0.05)
    authority = open_authority(tmp_path)
    first = content(authority, authority.pem)
    pki = SimpleNamespace(content=first)
    listeners = SimpleNamespace(
        authentication=None, oidc_authentication=None, inner_address="", sessions_path=None
    )

    async def story() -> None:
        page = WebListener(listeners, None, None, NAMES, pki)  # type: ignore[arg-type]  # nobody logs in
        port = free_port()
        await page.start(f"0.0.0.0:{port}")
        watch = asyncio.create_task(page.watch())

        async def shown() -> bytes:
            return (await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))).encode()

        try:
            for wrong in (replace(first, client_ca=b"nothing"), replace(first, key=b"nothing")):
                caplog.clear()
                pki.content = wrong
                async with asyncio.timeout(TIMEOUT_S):
                    while not ("keeps its" in caplog.text or watch.done()):  # noqa: ASYNC110 - as below
                        await asyncio.sleep(0.05)
                assert not watch.done()
                assert await shown() == first.certificate
            pki.content = second = content(authority, authority.pem)
            async with asyncio.timeout(TIMEOUT_S):
                while await shown() != second.certificate:  # noqa: ASYNC110 - the listener polls
                    await asyncio.sleep(0.05)
        finally:
            watch.cancel()
            await page.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(story())
