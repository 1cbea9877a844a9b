"""Requests of hooks that nobody waits for any more."""

import http.client
import threading

import pytest
import trio
from leasehold_worker.hooks.http_call import call

from tests.worker.framework_servers import ScriptedServer, serving


async def test_what_was_cancelled_while_it_connected_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    connecting, may_connect, over = threading.Event(), threading.Event(), threading.Event()
    connect, close = http.client.HTTPConnection.connect, http.client.HTTPConnection.close

    def slow(connection: http.client.HTTPConnection) -> None:
        connecting.set()
        may_connect.wait(20)
        connect(connection)

    def closed(connection: http.client.HTTPConnection) -> None:
        close(connection)
        over.set()

    monkeypatch.setattr(http.client.HTTPConnection, "connect", slow)
    monkeypatch.setattr(http.client.HTTPConnection, "close", closed)
    with serving(ScriptedServer()) as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "POST", f"{server.url}/sleep")
            await trio.to_thread.run_sync(connecting.wait, 20)
            nursery.cancel_scope.cancel()
        may_connect.set()
        assert await trio.to_thread.run_sync(over.wait, 20)
    assert server.calls == []
