"""Blocking calls in threads, of which there may be too few."""

import errno
import threading

import pytest
from leasehold_worker.threads import require_threads, run_in_thread


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


async def test_a_thread_that_can_not_be_started_is_an_error_of_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trio._core._thread_cache.THREAD_CACHE._idle_workers", {})
    called: list[int] = []
    with monkeypatch.context() as shortage:
        shortage.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(BlockingIOError, match="no thread can be started") as refused:
            await run_in_thread(called.append, 1)
    assert (refused.value.errno, called) == (errno.EAGAIN, [])
    await run_in_thread(called.append, 2)
    assert called == [2]


async def test_an_error_of_the_function_is_left_as_it_is() -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(RuntimeError, match="new thread"):
        await run_in_thread(fail)


def test_threads_that_can_not_be_started_are_told_before_they_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require_threads(3)
    start, started = threading.Thread.start, list[threading.Thread]()

    def start_two(thread: threading.Thread) -> None:
        if len(started) == 2:
            no_thread(thread)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_two)
    with pytest.raises(BlockingIOError, match="no thread can be started"):
        require_threads(3)
    assert len(started) == 2
    assert not any(thread.is_alive() for thread in started)
