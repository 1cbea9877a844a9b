"""The threads of gRPC's calls, and the end of a server whose serving thread has died."""

import threading
import time
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
import trio
from leasehold_worker.errors import StartError
from leasehold_worker.local_api import call_threads
from leasehold_worker.local_api.call_threads import CallThreads, stop_server
from leasehold_worker.local_api.health_port import HealthService

GRACE_S = 0.2


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_call_needs_no_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = CallThreads(2, "test")
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    both = threading.Barrier(2)
    first, second = threads.submit(both.wait, 10), threads.submit(both.wait, timeout=10)
    assert {first.result(10), second.result(10)} == {0, 1}
    with pytest.raises(ZeroDivisionError):
        threads.submit(lambda: 1 / 0).result(10)
    threads.end()


def test_a_thread_is_started_for_a_call_that_needs_it_and_else_the_call_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_threads, "STARTED", 1)
    threads = CallThreads(3, "test")
    go = threading.Event()
    first = threads.submit(go.wait, 10)
    second = threads.submit(int, "2")
    assert second.result(10) == 2, "a second thread was started"
    while not threads._free:  # it is free a moment after the result
        time.sleep(0.01)
    third = threads.submit(go.wait, 10)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    fourth = threads.submit(int, "4")
    with pytest.raises(TimeoutError):
        fourth.result(0.1)
    monkeypatch.undo()
    threads.fill()
    assert fourth.result(10) == 4, "a thread is started once there is one"
    go.set()
    assert (first.result(10), third.result(10)) == (True, True)
    assert len(threads._threads) == 3
    threads.end()


def test_no_more_threads_are_started_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_threads, "STARTED", 1)
    threads = CallThreads(2, "test")
    go = threading.Event()
    calls = [threads.submit(go.wait, 10) for _ in range(5)]
    assert len(threads._threads) == 2
    go.set()
    assert all(call.result(10) for call in calls)
    for number in range(20):
        assert threads.submit(int, str(number)).result(10) == number
    assert len(threads._threads) == 2
    threads.end()


def test_too_few_threads_refuse_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            no_thread(thread)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(StartError, match="can't start 4 threads for calls"):
        CallThreads(4, "test")
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


class NoThreads:
    """What gRPC's serving thread dies of."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def submit(self, *_: object) -> Future[None]:
        self.asked.set()
        raise RuntimeError("can't start new thread")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_server_without_a_serving_thread_is_stopped_in_time(tmp_path: Path) -> None:
    dead, threads = NoThreads(), CallThreads(2, "test")
    server = grpc.server(dead)  # type: ignore[arg-type]
    health = HealthService(trio.lowlevel.current_trio_token(), lambda: True)
    server.add_generic_rpc_handlers((health.handlers(),))
    address = f"unix:{tmp_path}/grpc"
    server.add_insecure_port(address)
    server.start()
    with grpc.insecure_channel(address) as channel:
        check: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/grpc.health.v1.Health/Check"
        )
        call = check.future(b"", timeout=10)
        assert await trio.to_thread.run_sync(dead.asked.wait, 10)
        stuck = threading.Event()
        threads.submit(stuck.wait)
        with trio.fail_after(3 * GRACE_S + 5):
            await stop_server(server, threads, GRACE_S)
        call.cancel()
    stuck.set()
