"""Requests of hooks that nobody waits for any more, and answers of servers that nobody trusts."""

import http.client
import socket
import threading
import tracemalloc
from collections.abc import Callable

import pytest
import trio
import trio.testing
from leasehold_worker.hooks.http_call import HIDDEN, MOST_ANSWER_BYTES, USER_CALLS, HttpAnswer, call
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


def filled(start: bytes, filling: bytes, end: bytes) -> bytes:
    """A body of nearly the bytes that are read of an answer."""
    return start + filling * ((MOST_ANSWER_BYTES - 100) // len(filling)) + end


def peak_bytes(action: Callable[[], object]) -> int:
    """The memory that an action takes. As many objects would keep the event loop busy."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


LISTS = filled(b'{"is_sleeping": true, "more": [', b"[],", b"0]}")
KEYS = filled(b'{"is_sleeping": true', b',"a": {}', b"}")
NESTED = filled(b'{"is_sleeping": [', b"{},", b"0]}")


@pytest.mark.parametrize(
    ("body", "value"), [(LISTS, True), (KEYS, True), (NESTED, None)], ids=["lists", "keys", "nested"]
)
def test_a_field_is_read_without_objects_of_the_others(body: bytes, value: object) -> None:
    answer = HttpAnswer(200, body)
    read: list[object] = []
    assert peak_bytes(lambda: read.append(answer.field("is_sleeping", MOST_ANSWER_BYTES))) < 2**19
    assert read == [value]


def test_only_the_beginning_of_an_answer_is_made_text() -> None:
    answer = HttpAnswer(500, b"a" * MOST_ANSWER_BYTES)
    shown: list[str] = []
    assert peak_bytes(lambda: shown.append(str(answer))) < 2**17
    assert shown[0].startswith("500: aaa")


def test_a_token_at_the_end_of_the_shown_text_is_hidden() -> None:
    token = "s3cr3t"
    for spaces in range(2000, 2100):
        shown = str(HttpAnswer(500, b"refused" + b" " * spaces + token.encode() + b"." * 100, token))
        assert "s3" not in shown.replace(HIDDEN, "")
