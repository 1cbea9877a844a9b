"""Requests of hooks that nobody waits for any more."""

import http.client
import socket
import threading

import pytest
import trio
import trio.testing
from leasehold_worker.hooks.http_call import USER_CALLS, call
from leasehold_worker.host.accounts import numbered_account

from tests.worker.framework_servers import ScriptedServer, serving
from tests.worker.unix_users import ALICE_UID, needs_root


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


@needs_root
async def test_servers_that_hang_for_one_user_delay_no_other_user() -> None:
    alice = numbered_account(ALICE_UID, ALICE_UID)
    silent_server = socket.create_server(("127.0.0.1", 0), backlog=2 * USER_CALLS)
    with silent_server as silent, serving(ScriptedServer()) as server:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        async with trio.open_nursery() as nursery:
            for _ in range(USER_CALLS + 1):
                nursery.start_soon(call, "GET", url)
            await trio.testing.wait_all_tasks_blocked()
            with trio.fail_after(20):
                answer = await call("GET", f"{server.url}/health", account=alice)
            assert answer.status
            nursery.cancel_scope.cancel()
