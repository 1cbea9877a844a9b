"""Servers that answer hooks with anything: the operation fails by its hook's name, and nothing else does."""

import contextlib
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from leasehold.v1 import errors_pb2
from leasehold.v1.hook_pb2 import Hook, HttpHook, SglangHook, VllmHook
from leasehold_worker.errors import OperationError
from leasehold_worker.hooks import freed_memory, runner

from tests.worker.hook_contexts import BEFORE, DISCARD, OFFLOAD, context

from .conftest import Examples

SEEDS = st.integers(0, 2**32)
BODIES = (
    b"",
    b"null",
    b'{"is_sleeping": "yes"}',
    b'{"is_sleeping": true, "success": false}',
    b'{"is_sleeping": false}',
    b'{"enable_memory_saver": true, "enable_weights_cpu_backup": true, "model_path": "m"}',
    b'{"enable_memory_saver": true, "model_path": ["' + b"[" * 2000 + b'"]}',
    b"[" * 100_000,
    b'{"is_sleeping": ' + b"9" * 10_000 + b"}",
    b"\xff\xfe\x00" * 1000,
    b"\x1b]0;owned\x07" * 10,
    b"x" * 3_000_000,
)
STATUSES = ("200 OK", "204 No", "302 Found", "404 Not", "500 No", "999 x", "-1 x", "200", "", "1e3 x", "\xff")
HEADERS = (
    "Content-Length: -5",
    "Content-Length: 99999999999999999999",
    "Content-Length: abc",
    "Transfer-Encoding: chunked",
    "Location: http://169.254.169.254/",
    "X: " + "y" * 70_000,
    "Connection: keep-alive",
    "Content-Encoding: gzip",
    "Content-Length: 2\r\nContent-Length: 3",
    "\xff\xfe: \xff",
    ": :",
)
FINE = {errors_pb2.ERROR_REASON_HOOK_FAILED, errors_pb2.ERROR_REASON_MEMORY_NOT_FREED}


def made_up(choose: random.Random) -> bytes:
    """An answer, or something like it."""
    body = choose.choice(BODIES)
    kind = choose.random()
    if kind < 0.1:
        return choose.randbytes(choose.randrange(200))
    lines = [f"HTTP/1.{choose.choice('019')} {choose.choice(STATUSES)}"]
    lines += choose.sample(HEADERS, choose.randrange(3)) if kind < 0.6 else [f"Content-Length: {len(body)}"]
    if kind < 0.2:
        lines += [f"H{number}: x" for number in range(200)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


@contextmanager
def server(choose: random.Random) -> Iterator[str]:
    """Answers every call by something else, until it is closed."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(2)
                connection.recv(65_536)
                connection.sendall(made_up(choose))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


async def play(seed: int) -> None:
    choose = random.Random(seed)
    readings = [choose.choice([None, 0, 2**30]) for _ in range(4)]

    async def measure() -> int | None:
        return choose.choice(readings)

    with server(choose) as url:
        hook = choose.choice(
            [
                Hook(name="engine", vllm=VllmHook(url=url, suspend_method="a", resume_method="b")),
                Hook(name="engine", sglang=SglangHook(url=url)),
                Hook(name="engine", phase=BEFORE, http=HttpHook(method="GET", url=url)),
            ]
        )
        hook.timeout.FromMilliseconds(200)
        used = context([hook], Path.cwd(), choose.choice([OFFLOAD, DISCARD]), measure=measure)
        told = []
        for way in (runner.down, runner.up):
            try:
                with trio.fail_after(30):
                    await way(used)
            except OperationError as error:
                told.append(error)
    assert all(error.reason in FINE and error.metadata["hook"] == "engine" for error in told), told
    texts = [*(error.message for error in told), *used.warnings]
    assert all(len(text) < 4000 for text in texts)
    assert not [text for text in texts if "\x1b" in text], "a server's escapes reach no terminal"


def test_any_answer_is_an_end_of_the_hook(examples: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "FREED_DEADLINE_S", 0.1)

    @examples
    @given(SEEDS)
    def run(seed: int) -> None:
        trio.run(play, seed)

    run()
