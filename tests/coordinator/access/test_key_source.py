"""Keys are read again at intervals and when one is missing, and never too often, too long or too much."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

import pytest
from leasehold_coordinator.access import key_source
from leasehold_coordinator.access.key_source import KeySource, check_url, fetch_keys, read_key_file

from tests.coordinator.issuer import key_set, new_keys, serving_keys

KEYS = new_keys()
ONE, ALL = key_set({"es": KEYS["es"]}), key_set(KEYS)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a thread of the server changes it
            await asyncio.sleep(0.01)


def test_a_missing_key_causes_one_read_per_interval() -> None:
    async def scenario() -> None:
        with serving_keys(ONE) as server:
            source = KeySource(lambda: fetch_keys(server.url), 3_600.0, 3_600.0)
            running = asyncio.create_task(source.run())
            await until(lambda: bool(source.keys))
            server.document = ALL
            assert not any(source.ask() for _ in range(100))
            assert (list(source.keys), server.fetches) == (["es"], 1)
            running.cancel()
            source = KeySource(lambda: fetch_keys(server.url), 3_600.0, 0.2)
            running = asyncio.create_task(source.run())
            await until(lambda: "rs" in source.keys)
            server.document = ONE
            await until(source.ask)
            await until(lambda: list(source.keys) == ["es"])
            running.cancel()

    asyncio.run(scenario())


def test_earlier_keys_stay_while_the_issuer_is_away(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        with serving_keys(ONE) as server:
            source = KeySource(lambda: fetch_keys(server.url), 0.05, 0.05)
            running = asyncio.create_task(source.run())
            await until(lambda: bool(source.keys))
            for status, document in ((500, ONE), (200, b"{}"), (302, ONE), (200, b"x" * 300_000)):
                server.status, server.document, before = status, document, server.fetches
                await until(lambda before=before: server.fetches > before + 1)  # type: ignore[misc]
                assert list(source.keys) == ["es"]
            running.cancel()

    asyncio.run(scenario())
    text = caplog.text
    assert "1 earlier ones stay" in text
    for part in ("HTTP Error 500", "no list of keys", "HTTP Error 302", "more than 262144 bytes"):
        assert part in text


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b""])
def test_a_server_that_sends_slowly_ends_the_fetch(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    monkeypatch.setattr(key_source, "FETCH_TIMEOUT_S", 0.3)
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4_096)
            connection.sendall(start)
            while not over.wait(0.02):
                try:
                    connection.sendall(b"x")
                except OSError:
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        try:
            with pytest.raises((OSError, HTTPException)):
                fetch_keys(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        finally:
            over.set()
            thread.join()


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(ONE)
    assert read_key_file(path) == ONE
    path.write_bytes(b"x" * 262_145)
    with pytest.raises(ValueError, match="more than 262144 bytes"):
        read_key_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        read_key_file(path)


@pytest.mark.parametrize(
    ("url", "is_good"),
    [
        ("https://login.example/keys", True),
        ("http://127.0.0.1:8080/keys", True),
        ("http://localhost/keys", True),
        ("http://[::1]/keys", True),
        ("http://login.example/keys", False),
        ("http://127.0.0.1.evil.example/keys", False),
        ("http://localhost@evil.example/", False),
        ("file:///etc/passwd", False),
        ("ftp://127.0.0.1/", False),
        ("https://", False),
        ("keys", False),
    ],
)
def test_only_urls_with_tls_off_loopback(url: str, is_good: bool) -> None:
    if is_good:
        check_url(url)
    else:
        with pytest.raises(ValueError, match="https://"):
            check_url(url)
