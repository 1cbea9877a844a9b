"""Blocking calls in threads of trio. A thread that can't be started is an error of the operating system."""

import errno
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


def require_threads(count: int) -> None:
    """Checks that so many further threads can be started now.

    Raises:
        BlockingIOError: They can't.
    """
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(count)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise _shortage(error) from error
    finally:
        done.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()


async def run_in_thread(
    function: Callable[[*Arguments], Answer],
    *arguments: *Arguments,
    abandon_on_cancel: bool = False,
    limiter: trio.CapacityLimiter | None = None,
) -> Answer:
    """Like ``trio.to_thread.run_sync``, except for the error of a thread that can't be started.

    Python raises a RuntimeError then, although the cause is the same as of a refused fork(2): a limit of
    processes. The tasks of the worker already treat an OSError as a shortage that passes.

    Raises:
        OSError: EAGAIN: no thread can be started, and the function was not called.
        Exception: Whatever the function raises.
    """
    is_begun = False

    def call() -> Answer:
        nonlocal is_begun
        is_begun = True
        return function(*arguments)

    try:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=abandon_on_cancel, limiter=limiter)
    except RuntimeError as error:
        if is_begun:
            raise
        raise _shortage(error) from error


def _shortage(error: RuntimeError) -> OSError:
    return OSError(errno.EAGAIN, f"no thread can be started ({error})")
