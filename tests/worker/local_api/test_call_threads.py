"""The threads of gRPC's calls, and the end of a server whose serving thread has died."""

import threading
from concurrent.futures import Future
from pathlib import Path

import grpc
import pytest
import trio
from leasehold_worker.errors import StartError
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
